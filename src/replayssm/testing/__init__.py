"""Inputs, poison, guard bands and the oracle's rule: for tests, ``replayssm verify`` and whoever writes a backend."""

from replayssm.testing.conformance import VerifyRow, check_backend, verify_backends
from replayssm.testing.inputs import GUARD, Inputs, assert_guards, guarded, make_inputs, same_bits
from replayssm.testing.memory import assert_untouched, make_pool, memory, poison, snapshot
from replayssm.testing.oracle import Oracle, Tally, assert_close_to_oracle, plain

__all__ = [
    "GUARD", "Inputs", "Oracle", "Tally", "VerifyRow", "assert_close_to_oracle", "assert_guards", "assert_untouched",
    "check_backend", "guarded", "make_inputs", "make_pool", "memory", "plain", "poison", "same_bits", "snapshot",
    "verify_backends",
]  # fmt: skip
