"""The last answers to each problem, kept on the host: what drafts of kind `history` look through
when the problem comes again."""

import base64
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from jaxspec.processes.parcels import exchange_parcels

Answers = dict[int, list[np.ndarray]]
"""By problem, or by place in a batch, as token ids."""


class AnswerHistory:
    """Up to `past` answers of each problem; a newer batch's replace an older one's.

    Each process keeps those that it has made, and of all others knows which process keeps them:
    they are sent when their problem comes again. `process` is this one, and `exchange` sends.
    """

    def __init__(
        self,
        past: int,
        process: int = 0,
        exchange: Callable[
            [Mapping[int, bytes], Collection[int]], Mapping[int, bytes]
        ] = exchange_parcels,
    ) -> None:
        self.past, self._process, self._exchange = past, process, exchange
        self._owners: dict[int, int] = {}
        self._answers: Answers = {}

    def store_answers(
        self, owners: Mapping[int, int], local_answers: Mapping[int, Sequence[np.ndarray]]
    ) -> None:
        """Remembers which process has made the newest answers to some problems, and the first
        `past` of the `local_answers`, made here."""
        self._owners |= owners
        for problem, owner in owners.items():
            self._answers.pop(problem, None)
            if owner == self._process:
                answers = local_answers[problem][: self.past]
                self._answers[problem] = [np.asarray(answer, np.int32) for answer in answers]

    def fetch_answers(self, askers: Mapping[int, Collection[int]]) -> Answers:
        """What is remembered of the problems that this process is going to ask. All processes call
        it, with the problems that any of them asks, and who does."""
        this_process = self._process
        fetched: Answers = {}
        outgoing: dict[int, Answers] = {}
        senders: set[int] = set()
        for problem, processes in askers.items():
            owner = self._owners.get(problem)
            if owner == this_process:
                for process in processes:
                    destination = (
                        fetched if process == this_process else outgoing.setdefault(process, {})
                    )
                    destination[problem] = self._answers[problem]
            elif owner is not None and this_process in processes:
                senders.add(owner)
        parcels = {process: _pack_answers(answers) for process, answers in outgoing.items()}
        for parcel in self._exchange(parcels, senders).values():
            fetched |= _unpack_answers(parcel)
        return fetched

    @property
    def owners(self) -> list[tuple[int, int]]:
        """Each problem, and the process that keeps its answers."""
        return [*self._owners.items()]

    def encode_answers(self) -> str:
        """What this process keeps as text, for a checkpoint."""
        return base64.b64encode(_pack_answers(self._answers)).decode()

    def restore_answers(self, owners: Iterable[tuple[int, int]], dumps: Iterable[str]) -> None:
        """Takes over what some processes have dumped, where each process has done so with what is
        its own by `owners` from now on."""
        self._owners, self._answers = dict(owners), {}
        for dump in dumps:
            self._answers |= _unpack_answers(base64.b64decode(dump))


def _pack_answers(answers: Answers) -> bytes:
    pairs = [
        (problem, answer)
        for problem, problem_answers in answers.items()
        for answer in problem_answers
    ]
    file = io.BytesIO()
    np.savez_compressed(
        file,
        problems=np.asarray([problem for problem, _ in pairs], np.int64),
        lengths=np.asarray([len(answer) for _, answer in pairs], np.int64),
        tokens=np.concatenate([np.zeros(0, np.int32), *(answer for _, answer in pairs)]),
    )
    return file.getvalue()


def _unpack_answers(parcel: bytes) -> Answers:
    answers_by_problem: Answers = {}
    with np.load(io.BytesIO(parcel)) as file:
        answers = np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])
        for problem, answer in zip(file["problems"].tolist(), answers, strict=False):
            answers_by_problem.setdefault(problem, []).append(answer)
    return answers_by_problem
