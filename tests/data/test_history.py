"""What is remembered of earlier answers, by one process or several between them, and that
checkpoints keep it."""

import base64
import io
import itertools
import queue
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxspec.data.history import AnswerHistory
from jaxspec.storage.checkpoint import successor_process


class Post:
    """Carries parcels between threads that stand for processes, and knows who got which."""

    def __init__(self, processes: int) -> None:
        pairs = itertools.permutations(range(processes), 2)
        self._boxes = {pair: queue.Queue[bytes]() for pair in pairs}
        self.carried = 0

    def all_fetched(self) -> bool:
        return all(box.empty() for box in self._boxes.values())

    def of(self, me: int) -> Callable[[Mapping[int, bytes], Collection[int]], dict[int, bytes]]:
        def swap(parcels: Mapping[int, bytes], senders: Collection[int]) -> dict[int, bytes]:
            for process, parcel in parcels.items():
                self.carried += 1
                self._boxes[me, process].put(parcel)
            return {sender: self._boxes[sender, me].get(timeout=10) for sender in senders}

        return swap


def brought(history: AnswerHistory, *problems: int) -> dict[int, list[list[int]]]:
    """What a process alone remembers of problems."""
    found = history.fetch_answers({problem: {0} for problem in problems})
    return {problem: [each.tolist() for each in answers] for problem, answers in found.items()}


def all_brought(
    histories: list[AnswerHistory], askers: dict[int, set[int]]
) -> list[dict[int, list[list[int]]]]:
    """What each of several processes gets."""
    with ThreadPoolExecutor(len(histories)) as pool:
        found = list(pool.map(lambda history: history.fetch_answers(askers), histories))
    return [
        {problem: [each.tolist() for each in answers] for problem, answers in one.items()}
        for one in found
    ]


def filled() -> AnswerHistory:
    history = AnswerHistory(2)
    history.store_answers(
        {7: 0, 3: 0},
        {
            7: [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])],
            3: [np.array([], np.int32), np.array([9, 9])],
        },
    )
    return history


def test_the_first_answers_of_each_problem_are_remembered() -> None:
    assert brought(filled(), 7, 3, 1) == {7: [[1, 2, 3], [4]], 3: [[], [9, 9]]}


def test_newer_answers_replace_older_ones() -> None:
    history = filled()
    history.store_answers({7: 0}, {7: [np.array([0])]})
    assert brought(history, 7, 3) == {7: [[0]], 3: [[], [9, 9]]}


def test_dump_and_load() -> None:
    other = AnswerHistory(2)
    other.store_answers({1: 0}, {1: [np.array([1])]})
    other.restore_answers(filled().owners, [filled().encode_answers()])
    assert brought(other, 7, 3, 1) == brought(filled(), 7, 3, 1)
    empty = AnswerHistory(0)
    empty.restore_answers(AnswerHistory(0).owners, [AnswerHistory(0).encode_answers()])
    assert brought(empty, 7) == {}


def test_each_process_keeps_what_it_made_and_is_sent_what_it_asks() -> None:
    """Problems wander between three processes, and one of them is asked by two that share rows: all
    get what one process alone would remember; none keeps what another has made since."""
    random, post, alone = np.random.default_rng(0), Post(3), AnswerHistory(2)
    histories = [AnswerHistory(2, process, post.of(process)) for process in range(3)]
    for batch in range(20):
        problems = random.permutation(12)[:6].tolist()
        askers = {problem: {place // 2} for place, problem in enumerate(problems)}
        askers[problems[5]] = {0, 2}
        remembered = brought(alone, *problems)
        for process, found in enumerate(all_brought(histories, askers)):
            mine = [problem for problem, processes in askers.items() if process in processes]
            assert found == {each: remembered[each] for each in mine if each in remembered}
        answers = {
            problem: [np.array([batch, problem, k]) for k in range(int(random.integers(1, 4)))]
            for problem in problems
        }
        # Its answers are made where the problem is asked.
        makers = {problem: min(processes) for problem, processes in askers.items()}
        alone.store_answers(dict.fromkeys(problems, 0), answers)
        for process, history in enumerate(histories):
            made = {each: answers[each] for each in problems if makers[each] == process}
            history.store_answers(makers, made)
    kept = [held(history) for history in histories]
    assert sorted(problem for each in kept for problem in each) == sorted(held(alone))
    assert post.carried > 20
    assert post.all_fetched()


def held(history: AnswerHistory) -> set[int]:
    """The problems whose answers a process has by itself."""
    with np.load(io.BytesIO(base64.b64decode(history.encode_answers()))) as file:
        return set(file["problems"].tolist())


def test_fewer_and_more_processes_go_on_with_what_some_have_dumped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_by = {5: 0, 6: 1, 7: 2, 8: 0}
    before = [AnswerHistory(1, process) for process in range(3)]
    for process, history in enumerate(before):
        mine = {each: [np.array([each])] for each, maker in made_by.items() if maker == process}
        history.store_answers(made_by, mine)
    dumps = [history.encode_answers() for history in before]
    for count in (1, 2, 3, 5):
        post = Post(count)
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        after = [AnswerHistory(1, process, post.of(process)) for process in range(count)]
        for process, history in enumerate(after):
            keepers = [(problem, successor_process(keeper)) for problem, keeper in before[0].owners]
            history.restore_answers(
                keepers, [dumps[each] for each in range(3) if successor_process(each) == process]
            )
        everywhere = {problem: set(range(count)) for problem in (*made_by, 9)}
        whole = {problem: [[problem]] for problem in made_by}
        assert all_brought(after, everywhere) == [whole] * count
        assert post.all_fetched()
