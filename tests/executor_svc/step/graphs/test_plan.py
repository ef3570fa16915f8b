"""Graphs that settings ask for, on each kind of device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import structlog
import torch

from executor_svc.config.settings import load_settings
from executor_svc.step.graphs.plan import plan_graphs
from tandem.errors import InvalidConfig

CUDA, CPU = torch.device("cuda:1"), torch.device("cpu")


def settings(*argv):
    return load_settings(["--model", "some/dir", *argv], {})


def planned(loaded, device):
    """Plan graphs for steps of up to 20 rows."""
    return plan_graphs(loaded, replace(loaded.limits, max_batch_size=20), device)


class TestSetting:
    @pytest.mark.parametrize(
        ("text", "sizes"),
        [
            ("default", [20, 16, 8, 6, 4, 3, 2, 1]),
            ("-1", [20, 16, 8, 4, 2, 1]),
            ("3", [20, 16, 8]),
            ("1", [20]),
        ],
    )
    def test_number_names_a_list(self, text, sizes):
        """
        On a GPU the setting gives the sizes, which are logged.
        """
        with structlog.testing.capture_logs() as logs:
            plan = planned(settings(f"--num-cuda-graphs={text}"), CUDA)
        assert plan is not None
        assert sizes == list(plan.sizes) == logs[0]["rows"]

    def test_none_captures_none(self, tmp_path):
        """
        "none", or null in a file as Megatron Core has it, runs every step eagerly.
        """
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"num_cuda_graphs": None}))
        for loaded in (settings("--num-cuda-graphs=none"), settings(f"--config={path}")):
            assert "none" == loaded.settings.num_cuda_graphs
            assert planned(loaded, CUDA) is None

    def test_steps_with_prompts_have_shapes_of_the_same_sizes(self):
        """
        Each size is captured for prompts beside decodes and, where rows suffice, for prompts alone.
        """
        mixed = planned(settings("--num-cuda-graphs=3"), CUDA).mixed
        assert [(20, 20, 0), (20, 16, 4), (16, 16, 0)] == [
            (shape.num_tokens, shape.num_prefills, shape.num_decodes) for shape in mixed
        ]

    @pytest.mark.parametrize(
        "flag", ["--cuda-graph-mixed-prefill-count=0", "--no-use-cuda-graphs-for-non-decode-steps"]
    )
    def test_steps_with_prompts_can_be_left_out(self, flag):
        """
        No mixed prefills, or the switch off, captures decodes alone.
        """
        plan = planned(settings("--num-cuda-graphs=3", flag), CUDA)
        assert ((20, 16, 8), ()) == (plan.sizes, plan.mixed)

    @pytest.mark.parametrize("number", ["0", "-2"])
    def test_number_that_names_no_list_is_refused_at_the_start(self, number):
        """
        Settings are not accepted with 0 or less than -1; the message is Megatron Core's.
        """
        with pytest.raises(InvalidConfig, match=rf"^num_cuda_graphs must be >= 1, got {number}$"):
            settings(f"--num-cuda-graphs={number}")

    def test_words_are_refused_with_their_place(self):
        """
        A value that is neither a number nor one of the words is refused with the name of its flag
        and all that is accepted.
        """
        accepted = "input should be a valid integer or 'default' or 'none'"
        with pytest.raises(InvalidConfig, match=rf"^--num-cuda-graphs: {accepted}, got 'all'$"):
            settings("--num-cuda-graphs=all")


class TestCpu:
    @pytest.mark.parametrize("text", ["4", "-1", "default"])
    def test_number_without_effect_is_told(self, text):
        """
        A CPU captures nothing, and a setting that asks for graphs there is logged as a warning.
        """
        with structlog.testing.capture_logs() as logs:
            assert planned(settings(f"--num-cuda-graphs={text}"), CPU) is None
        (entry,) = logs
        assert ("setting_without_effect", "warning") == (entry["event"], entry["log_level"])
        assert f"num_cuda_graphs={text} (--num-cuda-graphs)" == entry["setting"]

    def test_other_settings_without_effect_are_told(self):
        """
        The same goes for settings of steps with prompts that ask for something.
        """
        flags = ["--cuda-graph-mixed-prefill-count=4", "--use-cuda-graphs-for-non-decode-steps"]
        with structlog.testing.capture_logs() as logs:
            assert planned(settings(*flags), CPU) is None
        assert [
            "cuda_graph_mixed_prefill_count=4 (--cuda-graph-mixed-prefill-count)",
            "use_cuda_graphs_for_non_decode_steps=True (--use-cuda-graphs-for-non-decode-steps)",
        ] == [entry["setting"] for entry in logs]

    @pytest.mark.parametrize(
        "argv",
        [[], ["--num-cuda-graphs=none"], ["--no-use-cuda-graphs-for-non-decode-steps"]],
        ids=len,
    )
    def test_nothing_asked_for_is_nothing_told(self, argv):
        """
        Without the setting, or with "none", there is nothing to tell.
        """
        with structlog.testing.capture_logs() as logs:
            assert planned(settings(*argv), CPU) is None
        assert [] == logs
