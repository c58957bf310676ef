"""The delay that the Hub asks for is kept."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from mlx_mmfree.hub.remote.cache_content import MAX_DELAY_S, delay_s


@pytest.mark.parametrize(
    ("headers", "tries", "want"),
    [
        ({}, 1, 1),
        ({}, 4, 8),
        ({"retry-after": "17"}, 1, 17),
        ({"retry-after": "0"}, 3, 0),
        ({"retry-after": "9" * 400}, 1, MAX_DELAY_S),
        ({"retry-after": "soon"}, 2, 2),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 2, 0),
        ({"ratelimit": '"api";r=0;t=55'}, 1, 55),
        ({"ratelimit": "nonsense"}, 1, 1),
    ],
)
def test_delays(headers: dict[str, str], tries: int, want: float) -> None:
    assert delay_s(headers, tries) == want


def test_a_date() -> None:
    until = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 0 < delay_s({"retry-after": until}, 1) <= 100
