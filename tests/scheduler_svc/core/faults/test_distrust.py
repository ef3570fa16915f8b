"""KV that may be wrong: the request that shared it computes everything itself."""

from __future__ import annotations

from scheduler_svc.core.faults.distrust import retry_alone
from tests.scheduler_svc.core.harness import Rig


class TestRetryAlone:
    def test_a_request_that_is_retried_shares_nothing_again(self):
        """
        A request that started over for wrong KV takes no block from the prefix cache, though another computed its prompt
        meanwhile.
        """
        rig = Rig()
        first = rig.submit(prompt_len=9, max_tokens=30)
        rig.step()
        retried = rig.submit(prompt=rig.submitted[first].prompt, max_tokens=6)
        rig.step()
        replica = rig.core._replica
        request = replica.slots.request_of(1)
        assert 8 == rig.batches[-1].admits[0].num_cached_tokens
        retry_alone(replica, request)
        rig.submit(prompt=rig.submitted[first].prompt, max_tokens=6)
        rig.run()
        cached = [
            admission.num_cached_tokens for batch in rig.batches[2:] for admission in batch.admits
        ]
        assert 0 in cached
        assert request.prefix.is_alone
        assert rig.expected(retried) == rig.outputs[retried]
