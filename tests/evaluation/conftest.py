"""What the tests of measurements share."""

from tests.ops.conftest import emulated as emulated
