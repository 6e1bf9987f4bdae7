"""Compares the vocabularies of two tokenizers."""

from pathlib import Path

import tokenizers

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.inputs.json_keys import join_names

TOKENIZER_FILE = "tokenizer.json"


def check_same_tokens(policy_folder: Path, draft_folder: Path) -> None:
    """Checks that policy and draft share their vocabulary.

    Added tokens may differ, and either may have more tokens.

    Raises:
      ConfigError: an id stands for different tokens in the two, or a file cannot be read.
    """
    policy_tokens, policy_added_ids = _read_vocabulary(policy_folder)
    draft_tokens, draft_added_ids = _read_vocabulary(draft_folder)
    # Only the policy's tokenizer encodes and decodes texts. The draft sees ids, so that only the
    # meaning of shared ids matters.
    differences = [
        f"{token_id} ({policy_tokens[token_id]!r}, {draft_tokens[token_id]!r})"
        for token_id in sorted(
            policy_tokens.keys() & draft_tokens.keys() - policy_added_ids - draft_added_ids
        )
        if policy_tokens[token_id] != draft_tokens[token_id]
    ]
    require(
        not differences,
        f"{draft_folder / TOKENIZER_FILE} has other tokens than the policy's"
        f" {policy_folder / TOKENIZER_FILE}, for {len(differences)} ids: {join_names(differences)};"
        " choose a draft that shares the policy's tokenizer",
    )


def _read_vocabulary(folder: Path) -> tuple[dict[int, str], set[int]]:
    """Reads the tokens by id, and the ids of added tokens."""
    file = folder / TOKENIZER_FILE
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file}: {first_line(error)}; download the file again") from error
    tokens_by_id = {
        token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
    }
    return tokens_by_id, {*tokenizer.get_added_tokens_decoder()}
