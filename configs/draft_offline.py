"""Offline training of the draft on the policy's own responses: policy and data of rl_think, a
longer draft training.

  python -m jaxspec.train_draft --config draft_offline.py
  python -m jaxspec.train_draft --config draft_offline.py --rollout.draft.kind mtp
  python -m jaxspec.train_draft --config draft_offline.py:qwen3_0.6b \
    --model.path FOLDER --data.path FILE

Stopped at any time, the same command goes on. It ends with a table: expected acceptance by depth on
held-out responses.

Vary: --rollout.draft.kind eagle3, mtp, model; --offline.steps (acceptance grows with it);
--offline.text generic, or a JSON-lines file with a column `text`, instead of the policy's own
responses; --draft_training.loss ce, kl, lk, lambda, tv; --draft_training.ttt_steps (as many as
rollout.draft.draft_length, or more); --rollout.draft.eagle3.vocab 24 (a vocabulary of its own).
Expect (tiny, seed 0, on 2 cores of an Intel Xeon at 2.8 GHz, 22 November 2026): on 256 held-out
responses, expected acceptance 0.98 at depths 1 to 3, which would keep 3.86 of 4 tokens a round; 225
s with an empty cache. With half the samples and steps, the defaults of rl_think, 3.67.
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.config.cli import read_config
from jaxspec.config.settings import Config

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    offline = think.offline
    if scale == "tiny":
        return replace(think, offline=replace(offline, samples=4096, steps=600))
    longer = replace(offline, samples=2 * offline.samples, steps=4 * offline.steps)
    return replace(think, offline=longer)
