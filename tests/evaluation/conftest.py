"""Shared parts of the tests of measurements."""

from tests.ops.conftest import emulated as emulated
