"""Transport of weights and batches between processes of the two sides."""

import json
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.links import Copy, MeshLink
from jaxspec.processes import mailbox, roles
from jaxspec.processes.mailbox import ArrayServer
from jaxspec.state import PyTree

WEIGHTS, BATCHES = range(2)
"""Kinds of trees. Each kind counts its trees by itself."""
_NAMES = ("weights", "batch")
# Numbers of offers are 64-bit integers, and a job has fewer than 4,096 processes.
_PROCESS_BITS, _KIND_SHIFT = 12, 60


class TreeTransport:
    """Transport of trees of one kind from one side to the other, between processes.

    Args:
      kind: `WEIGHTS` or `BATCHES`.
      link: link of the trees, between meshes of different processes.
      server: server of this process.
    """

    def __init__(self, kind: int, link: MeshLink, server: ArrayServer) -> None:
        self._kind, self._link, self._server = kind, link, server
        process = jax.process_index()
        self._outgoing: dict[int, list[Copy]] = {}
        self._incoming: dict[int, list[Copy]] = {}
        for copy in link.copies:
            sender, receiver = copy.source_device.process_index, copy.target_device.process_index
            if sender == process:
                self._outgoing.setdefault(receiver, []).append(copy)
            if receiver == process:
                self._incoming.setdefault(sender, []).append(copy)
        # The first process of a side also sends the message of a batch.
        self._first_sender = min(copy.source_device.process_index for copy in link.copies)

    def offer(self, number: int, packed: PyTree, message: Any = None) -> None:
        """Offers a tree with a message, and returns at once."""
        for receiver, copies in self._outgoing.items():
            pieces = self._link.read_pieces(packed, copies)
            self._server.offer_arrays(
                self._offer_number(number, jax.process_index(), receiver), pieces
            )
        content = json.dumps(message).encode() if roles.is_first_member() else b"null"
        mailbox.post_message(self._message_name(number, jax.process_index()), content)

    def receive(self, number: int, is_closed: Callable[[], bool]) -> tuple[PyTree, Any] | None:
        """Waits for an offer, and pulls it. Returns the tree and the message of its first sender.

        The tree may not have arrived yet. Returns None once `is_closed` returns true.
        """
        messages: dict[int, bytes] = {}
        for sender in sorted({self._first_sender, *self._incoming}):
            content = mailbox.receive_message(self._message_name(number, sender), is_closed)
            if content is None:
                return None
            messages[sender] = content
        pieces: list[jax.Array] = []
        copies: list[Copy] = []
        for sender, incoming in self._incoming.items():
            layouts = [(self._link.describe_piece(copy), copy.target_device) for copy in incoming]
            offer = self._offer_number(number, sender, jax.process_index())
            pieces += self._server.pull_arrays(sender, offer, layouts)
            copies += incoming
        packed = self._link.place_pieces(copies, pieces)
        return packed, json.loads(messages[self._first_sender])

    def forget(self, number: int) -> None:
        """Removes the message of an earlier offer of this process."""
        mailbox.remove_message(self._message_name(number, jax.process_index()))

    def _message_name(self, number: int, sender: int) -> str:
        return f"{_NAMES[self._kind]}/{number}/{sender}"

    def _offer_number(self, number: int, sender: int, receiver: int) -> int:
        pair = (sender << _PROCESS_BITS) + receiver
        return (self._kind << _KIND_SHIFT) + (number << 2 * _PROCESS_BITS) + pair
