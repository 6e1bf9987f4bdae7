"""What Orbax tells beside what it raises is not printed."""

import logging

import pytest

from jaxspec.storage.orbax_errors import silence_orbax


def test_what_orbax_leaves_to_asyncio_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    silence_orbax()
    logger = logging.getLogger("asyncio")
    logger.error("Future exception was never retrieved\nfuture: <Future finished>")
    logger.error("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
