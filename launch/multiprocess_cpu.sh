#!/usr/bin/env bash
# N processes of the main job on this machine's CPU, joined over loopback: bash launch/multiprocess_cpu.sh 2 --config rl_think.py
# DEVICES_PER_PROCESS (default 1) virtual devices each. Ctrl-C, SIGTERM and SIGHUP are passed on, and all processes save and end.
# When one fails, the others are told to stop and have SAVE_SECONDS (default 120) to do so. The first failure is the exit code.
# One that is stopped (SIGSTOP) for some seconds is killed. When this script is killed, all get a SIGTERM.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ! ${1-} =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: bash launch/multiprocess_cpu.sh N --config NAME.py ... (N processes, 1 or more)" >&2
  exit 2
fi
if [[ ! ${SAVE_SECONDS:=120} =~ ^[0-9]+$ ]]; then
  echo "SAVE_SECONDS is '$SAVE_SECONDS'; give a whole number of seconds, or unset it" >&2
  exit 2
fi
processes=$1
shift
python="$root/.venv/bin/python"
[[ -x $python ]] || python=python3

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
export JAXSPEC_COORDINATOR=127.0.0.1:$port JAXSPEC_PROCESSES=$processes JAXSPEC_LOCAL_DEVICES=${DEVICES_PER_PROCESS:-1}

running=()
tell() { kill "-$1" "${running[@]}" 2>/dev/null; }
for number in TERM INT HUP; do
  # shellcheck disable=SC2064 # the signal's name is that of this turn
  trap "tell $number" "$number"
done
# Linux tells a process when the one that started it is gone; elsewhere there is no such command.
with_us=(setpriv --pdeathsig TERM)
"${with_us[@]}" true 2>/dev/null || with_us=()
# With job control each process has a group of its own and handles Ctrl-C, which therefore comes from here only, once.
set -m
for ((id = 0; id < processes; id++)); do
  JAXSPEC_PROCESS_ID=$id ${with_us[@]+"${with_us[@]}"} "$python" -m jaxspec.train "$@" </dev/null &
  running+=("$!")
done
set +m

failure=0
look=$((SECONDS + 6))
stopped=" "
while ((${#running[@]})); do
  sleep 0.2
  alive=()
  for pid in "${running[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      alive+=("$pid")
      continue
    fi
    wait "$pid"
    code=$?
    if ((code != 0 && failure == 0)); then
      failure=$code
      deadline=$((SECONDS + SAVE_SECONDS))
      tell TERM
    fi
  done
  running=(${alive[@]+"${alive[@]}"})
  # A process that waits for a dead peer does not get to its own SIGTERM.
  if ((failure && SECONDS > deadline)); then tell KILL; fi
  # One that is stopped gets none, and keeps the others waiting: it is killed when it is found so twice, or once after a failure.
  if ((!failure && SECONDS < look)); then continue; fi
  look=$((SECONDS + 6))
  before=$stopped
  stopped=" "
  for pid in ${running[@]+"${running[@]}"}; do
    [[ $(ps -o state= -p "$pid") == T* ]] || continue
    stopped+="$pid "
    if ((failure)) || [[ $before == *" $pid "* ]]; then
      echo "process $pid is stopped, which would keep the others waiting: it is killed" >&2
      kill -KILL "$pid" 2>/dev/null
    fi
  done
done
exit "$failure"
