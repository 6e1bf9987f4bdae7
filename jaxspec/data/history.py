"""Store of recent answers, for drafts of kind `history`.

These drafts search the last answers to a problem when it is sampled again. The store is in host
memory.
"""

import base64
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from jaxspec.processes.parcels import exchange_parcels

Answers = dict[int, list[np.ndarray]]
"""Token ids of answers, by number of the problem or by place in a batch."""


class AnswerHistory:
    """Store of the last answers to each problem.

    Of each problem, up to `past` answers of its newest batch are kept. Each process owns the
    answers that it generated, and knows the owners of all others. An owner sends its answers to the
    processes that sample their problem again.

    Args:
      past: maximum number of answers kept of a problem.
      process: index of this process.
      exchange: sends parcels to processes, and returns those of the given senders.
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
        """Replaces the answers to some problems.

        Args:
          owners: for each problem, the process that generated its newest answers.
          local_answers: answers that this process generated.
        """
        self._owners |= owners
        for problem, owner in owners.items():
            # Another process may own the problem now, which makes the answers here outdated.
            self._answers.pop(problem, None)
            if owner == self._process:
                answers = local_answers[problem][: self.past]
                self._answers[problem] = [np.asarray(answer, np.int32) for answer in answers]

    def fetch_answers(self, askers: Mapping[int, Collection[int]]) -> Answers:
        """Returns the stored answers that this process needs.

        These are answers to the problems that it samples next. All processes must call it with the
        same `askers`.

        Args:
          askers: for each problem, the processes that sample it.
        """
        this_process = self._process
        fetched: Answers = {}
        outgoing: dict[int, Answers] = {}
        senders: set[int] = set()
        for problem, processes in askers.items():
            # All processes know all owners, so senders and receivers agree without a request.
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
        """Pairs of a problem and the process that owns its answers."""
        return [*self._owners.items()]

    def encode_answers(self) -> str:
        """Encodes the answers of this process for a checkpoint."""
        return base64.b64encode(_pack_answers(self._answers)).decode()

    def restore_answers(self, owners: Iterable[tuple[int, int]], dumps: Iterable[str]) -> None:
        """Replaces all answers by those of a checkpoint.

        Args:
          owners: pairs of a problem and the process that owns its answers from now on.
          dumps: texts of `encode_answers` with the answers that this process owns from now on.
        """
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
    # One array for all answers, since each array of the file has a header of its own.
    np.savez_compressed(
        file,
        problems=np.asarray([problem for problem, _ in pairs], np.int64),
        lengths=np.asarray([len(answer) for _, answer in pairs], np.int64),
        # The empty array is for a store without answers, which `concatenate` refuses.
        tokens=np.concatenate([np.zeros(0, np.int32), *(answer for _, answer in pairs)]),
    )
    return file.getvalue()


def _unpack_answers(parcel: bytes) -> Answers:
    answers_by_problem: Answers = {}
    with np.load(io.BytesIO(parcel)) as file:
        answers = np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])
        # Without answers, `split` still gives one empty array.
        for problem, answer in zip(file["problems"].tolist(), answers, strict=False):
            answers_by_problem.setdefault(problem, []).append(answer)
    return answers_by_problem
