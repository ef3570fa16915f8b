"""Arguments that FlashInfer gets: the rows of our own attention, in its terms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import AttentionShape
from tandem_bench.device.operands import paged_buffers
from tandem_bench.kernels import attention_cases, flashinfer_peer
from tandem_bench.kernels.attention_cases import Rows, decode_rows, prompt_rows, ragged_rows

SHAPE = AttentionShape(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
TOLERANCE = 2e-6
"""Roundings of float32, 6e-8 each, in weighted sums of values up to about 4."""


class PagedAttention:
    """A stand-in that attends as FlashInfer's documentation of its page tables says."""

    def __init__(self, workspace: Tensor, layout: str, **options: object) -> None:
        assert ("NHD", torch.uint8) == (layout, workspace.dtype)

    def attend(self, query: Tensor, kv: tuple[Tensor, Tensor], first_query: Tensor) -> Tensor:
        outs = []
        for row in range(len(self.last_len)):
            pages = self.pages[self.first[row] : self.first[row + 1]].long()
            length = (len(pages) - 1) * self.page_size + int(self.last_len[row])
            own = query[first_query[row] : first_query[row + 1]]
            key, value = (
                part[pages].flatten(0, 1)[:length].repeat_interleave(self.group, 1) for part in kv
            )
            scores = torch.einsum("qhd,khd->hqk", own, key) * own.shape[2] ** -0.5
            hidden = torch.ones(len(own), length).triu(length - len(own) + 1).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(outs)


class Decode(PagedAttention):
    def plan(self, first, pages, last_len, *sizes: int, **types: object):
        assert (torch.float32, torch.float32) == (types["q_data_type"], types["kv_data_type"])
        self.first, self.pages, self.last_len = first, pages, last_len
        heads, kv_heads, _, self.page_size = sizes
        self.group = heads // kv_heads

    def run(self, query, kv):
        return self.attend(query, kv, torch.arange(len(query) + 1))


class Prefill(PagedAttention):
    def plan(self, first_query, *pages, causal, **types: object):
        assert causal
        self.first_query = first_query
        Decode.plan(self, *pages, **types)

    def run(self, query, kv):
        return self.attend(query, kv, self.first_query)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill
    )
    monkeypatch.setattr(flashinfer_peer, "_flashinfer", lambda: module)
    monkeypatch.setattr(flashinfer_peer, "_workspace", lambda _: torch.empty(1, dtype=torch.uint8))


class TestPeer:
    @pytest.mark.parametrize(
        "rows",
        [decode_rows(3, 16), ragged_rows(5, 30), prompt_rows(2, 13), prompt_rows(2, 5, cached=11)],
        ids=lambda rows: rows.text,
    )
    def test_attends_to_the_same_rows(self, rows: Rows):
        """
        Pages, lengths and queries are those of our own attention: so is the result.
        """
        buffers = paged_buffers(SHAPE, rows.query_len, rows.seq_len)
        ours = attention_cases._paged(buffers)()
        if max(rows.query_len) == 1:
            found = [
                flashinfer_peer._decode(buffers, use_tensor_cores=choice)()
                for choice in (False, True)
            ]
        else:
            found = [flashinfer_peer._prefill(buffers)()]
        for theirs in found:
            assert (ours - theirs).abs().max() <= TOLERANCE

    def test_is_no_peer_on_a_cpu(self, monkeypatch):
        """
        FlashInfer, where installed, is compared with on GPUs alone, in both its ways to decode.
        """
        monkeypatch.setattr(flashinfer_peer, "is_installed", lambda: True)
        assert [] == list(flashinfer_peer.contestants(SHAPE, is_decode=True))
        on_gpu = SimpleNamespace(device=torch.device("cuda"))
        decoding = [name for name, _ in flashinfer_peer.contestants(on_gpu, is_decode=True)]
        assert ["flashinfer", "flashinfer-tensor-cores"] == decoding
        assert ["flashinfer"] == [
            name for name, _ in flashinfer_peer.contestants(on_gpu, is_decode=False)
        ]


class TestRows:
    def test_pairs_are_those_that_attend(self):
        """
        Work is counted in pairs of a query and a key that it sees.
        """
        assert 5 * 6 // 2 == prompt_rows(1, 5).seen_pairs
        assert 2 * (11 * 5 + 15) == prompt_rows(2, 5, cached=11).seen_pairs
        assert 3 * 16 == decode_rows(3, 16).seen_pairs

    def test_dense_peer_computes_as_much(self):
        """
        Attention on dense keys has the shapes of the rows: the same queries and heads.
        """
        for rows, shape in (
            (decode_rows(3, 16), (3, 2, 2, 16)),
            (prompt_rows(2, 13), (2, 4, 13, 16)),
        ):
            assert shape == tuple(attention_cases._dense(SHAPE, rows, 0)().shape)
