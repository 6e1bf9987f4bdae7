"""What the two sides of a pipelined run tell each other, through a mailbox in this process."""

import pytest

from jaxspec.run.pipelined import remote
from jaxspec.step import Sizes


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    messages: dict[str, bytes] = {}
    monkeypatch.setattr(remote.mailbox, "post_message", messages.__setitem__)
    monkeypatch.setattr(remote.mailbox, "read_message", messages.get)
    monkeypatch.setattr(remote.mailbox, "receive_message", lambda name, *_: messages[name])
    return messages


@pytest.mark.usefixtures("mail")
def test_a_run_has_the_sizes_that_each_side_has_chosen_for_itself() -> None:
    remote.send_engine_sizes(Sizes(tokens=4096, slots=200, page_size=64, pages=900))
    chosen = remote.receive_engine_sizes(Sizes(tokens=512, slots=64, page_size=64, pages=0))
    assert chosen == Sizes(tokens=512, slots=200, page_size=64, pages=900)
