"""The last answers to each problem, kept on the host: what drafts of kind `history` look through
when the problem comes again."""

import base64
import io
import zlib
from collections.abc import Sequence

import numpy as np


class History:
    """Up to `past` answers of each problem, as token ids; a newer batch's replace an older
    one's."""

    def __init__(self, past: int) -> None:
        self.past = past
        self._answers: dict[int, list[np.ndarray]] = {}

    def keep(self, problem: int, answers: Sequence[np.ndarray]) -> None:
        """Remembers the first `past` answers to a problem."""
        self._answers[problem] = [np.asarray(answer, np.int32) for answer in answers[: self.past]]

    def texts(self, problem: int, prompt: Sequence[int]) -> list[np.ndarray]:
        """Prompt and answer of each answer that is remembered."""
        return [
            np.concatenate([np.asarray(prompt, np.int32), answer])
            for answer in self._answers.get(problem, [])
        ]

    def dump(self) -> str:
        """Everything as text, for a checkpoint."""
        pairs = [
            (problem, answer) for problem, answers in self._answers.items() for answer in answers
        ]
        file = io.BytesIO()
        np.savez(
            file,
            problems=np.asarray([problem for problem, _ in pairs], np.int64),
            lengths=np.asarray([len(answer) for _, answer in pairs], np.int64),
            tokens=np.concatenate([np.zeros(0, np.int32), *(answer for _, answer in pairs)]),
        )
        return base64.b64encode(zlib.compress(file.getvalue())).decode()

    def load(self, text: str) -> None:
        """Takes over what `dump` wrote."""
        with np.load(io.BytesIO(zlib.decompress(base64.b64decode(text)))) as file:
            answers = np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])
            self._answers = {}
            for problem, answer in zip(file["problems"].tolist(), answers, strict=False):
                self._answers.setdefault(problem, []).append(answer)
