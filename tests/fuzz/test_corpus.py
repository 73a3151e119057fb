"""Decoders accept or refuse as documented every input that a fuzzer kept, and every seed."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import kept_inputs
from tests.fuzz.decoders import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_seed_inputs_are_handled(name):
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        TARGETS[name].look(seed)
        TARGETS[name].look(seed[: len(seed) // 2])


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_inputs_are_handled(name):
    kept = kept_inputs(name)
    assert kept, f"no corpus: python -m tests.fuzz {name}"
    for entry, content in kept.items():
        try:
            TARGETS[name].look(content)
        except Exception as error:
            error.add_note(f"input {entry} of target {name}")
            raise
