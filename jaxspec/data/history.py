"""The last answers to each problem, kept on the host: what drafts of kind `history` look through
when the problem comes again."""

import base64
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from jaxspec.processes.parcels import swapped

Answers = dict[int, list[np.ndarray]]
"""By problem, or by place in a batch, as token ids."""


class History:
    """Up to `past` answers of each problem; a newer batch's replace an older one's.

    Each process keeps those that it has made, and of all others knows which process keeps them:
    they are sent when their problem comes again. `process` is this one, and `swap` sends.
    """

    def __init__(
        self,
        past: int,
        process: int = 0,
        swap: Callable[[Mapping[int, bytes], Collection[int]], Mapping[int, bytes]] = swapped,
    ) -> None:
        self.past, self._process, self._swap = past, process, swap
        self._keepers: dict[int, int] = {}
        self._kept: Answers = {}

    def keep(self, makers: Mapping[int, int], made: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Remembers which process has made the newest answers to some problems, and the first
        `past` of those that were `made` here."""
        self._keepers |= makers
        for problem, maker in makers.items():
            self._kept.pop(problem, None)
            if maker == self._process:
                answers = made[problem][: self.past]
                self._kept[problem] = [np.asarray(answer, np.int32) for answer in answers]

    def brought(self, askers: Mapping[int, Collection[int]]) -> Answers:
        """What is remembered of the problems that this process is going to ask. All processes call
        it, with the problems that any of them asks, and who does."""
        me = self._process
        found: Answers = {}
        sent: dict[int, Answers] = {}
        senders: set[int] = set()
        for problem, processes in askers.items():
            keeper = self._keepers.get(problem)
            if keeper == me:
                for process in processes:
                    here = found if process == me else sent.setdefault(process, {})
                    here[problem] = self._kept[problem]
            elif keeper is not None and me in processes:
                senders.add(keeper)
        parcels = {process: _packed(answers) for process, answers in sent.items()}
        for parcel in self._swap(parcels, senders).values():
            found |= _unpacked(parcel)
        return found

    @property
    def keepers(self) -> list[tuple[int, int]]:
        """Each problem, and the process that keeps its answers."""
        return [*self._keepers.items()]

    def dump(self) -> str:
        """What this process keeps as text, for a checkpoint."""
        return base64.b64encode(_packed(self._kept)).decode()

    def load(self, keepers: Iterable[tuple[int, int]], dumps: Iterable[str]) -> None:
        """Takes over what some processes have dumped, where each process has done so with what is
        its own by `keepers` from now on."""
        self._keepers, self._kept = dict(keepers), {}
        for text in dumps:
            self._kept |= _unpacked(base64.b64decode(text))


def _packed(answers: Answers) -> bytes:
    pairs = [(problem, answer) for problem, of_it in answers.items() for answer in of_it]
    file = io.BytesIO()
    np.savez_compressed(
        file,
        problems=np.asarray([problem for problem, _ in pairs], np.int64),
        lengths=np.asarray([len(answer) for _, answer in pairs], np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *(answer for _, answer in pairs)]),
    )
    return file.getvalue()


def _unpacked(parcel: bytes) -> Answers:
    found: Answers = {}
    with np.load(io.BytesIO(parcel)) as file:
        answers = np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])
        for problem, answer in zip(file["problems"].tolist(), answers, strict=False):
            found.setdefault(problem, []).append(answer)
    return found
