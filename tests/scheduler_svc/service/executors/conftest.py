from collections.abc import Callable

import pytest

from tests.scheduler_svc.service.executors.fleet import ADDRESSES


@pytest.fixture
def make_fleet(make_bench) -> Callable[..., object]:
    """Return a function that makes a service with several executors, all attached."""

    def make(num_executors: int = 2, *, is_up: bool = True, **settings):
        bench = make_bench(executor=",".join(ADDRESSES[:num_executors]), **settings)
        if is_up:
            for number, link in enumerate(bench.links.values()):
                link.boot(f"boot-{number}", address=ADDRESSES[number])
        return bench

    return make
