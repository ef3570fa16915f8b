"""Training of the bundled model: rates, order of the text, corpus, and what judges completions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.models.training.batches import Batches
from deploy.models.training.completions import (
    Completion,
    Sampling,
    draw,
    is_clean,
    is_cut_clean,
    loops,
)
from deploy.models.training.corpus import SourceFile, without_near_copies
from deploy.models.training.evaluate import TRANSCRIPTS_BEGIN, TRANSCRIPTS_END, with_transcripts
from deploy.models.training.export import export, load_exported
from deploy.models.training.model import ModelConfig, attend, attend_in_halves
from deploy.models.training.schedule import WARMUP_TOKENS, Decay, is_long_step, rate_factor
from deploy.models.training.train import Progress, Trainer

TINY = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1
)
GROWN = replace(TINY, num_kv_heads=2)
STREAM = np.arange(1000, dtype=np.uint16)


def windows(batches: Batches, count: int) -> list[int]:
    inputs, _ = batches.take(10, count)
    return inputs[:, 0].tolist()


class TestSchedule:
    def test_rate_rises_then_holds_for_ever(self):
        """
        The rate is half way up after half of the warm-up and stays at its peak without a decay.
        """
        seen = (WARMUP_TOKENS // 2, WARMUP_TOKENS, 10**12)

        assert [0.5, 1.0, 1.0] == [rate_factor(tokens, None) for tokens in seen]

    def test_decay_falls_from_where_it_began_to_zero(self):
        """
        A branch starts at the peak rate, has half of it after a quarter, and none at its end.
        """
        decay = Decay(start=4 * WARMUP_TOKENS, tokens=1000)
        seen = [decay.start + tokens for tokens in (0, 250, 1000, 2000)]

        assert [1.0, 0.5, 0.0, 0.0] == [rate_factor(tokens, decay) for tokens in seen]

    def test_long_windows_come_only_late_in_a_decay(self):
        """
        Every third step of the last half of a decay is long; a run that holds has none.
        """
        decay = Decay(start=0, tokens=100)

        assert [True, False, False, True] == [is_long_step(step, 60, decay) for step in range(4)]
        assert not any(is_long_step(step, 40, decay) for step in range(4))
        assert not any(is_long_step(step, 60, None) for step in range(4))


class TestBatches:
    def test_pass_visits_every_window_once(self):
        """
        Windows of one pass start one length apart and none comes twice.
        """
        batches = Batches(STREAM, 7, {})

        starts = sorted(windows(batches, batches.windows_per_pass(10)))

        assert {10} == set(np.diff(starts))

    def test_passes_differ_in_order(self):
        """
        The second pass is not the first one again.
        """
        batches = Batches(STREAM, 7, {})
        count = batches.windows_per_pass(10)

        assert windows(batches, count) != windows(batches, count)

    @pytest.mark.parametrize("before", [1, 97, 98, 150])
    def test_resumed_run_takes_the_very_next_window(self, before):
        """
        A run stopped after any number of windows, in any pass, goes on as if it had not been.
        """
        whole = windows(Batches(STREAM, 7, {}), 250)
        stopped = Batches(STREAM, 7, {})
        windows(stopped, before)

        resumed = Batches(STREAM, 7, dict(stopped.taken))

        assert whole[before:] == windows(resumed, 250 - before)

    def test_targets_are_the_tokens_after_the_inputs(self):
        """
        Each target is the token that follows its input in the stream.
        """
        inputs, targets = Batches(STREAM, 7, {}).take(10, 4)

        assert torch.equal(inputs + 1, targets)


class TestCheckpoint:
    @pytest.mark.parametrize("decay", [None, Decay(start=3, tokens=4)])
    def test_loaded_run_has_weights_and_progress_of_the_saved_one(self, tmp_path, decay):
        """
        A checkpoint brings back weights, momentum, and where run and decay stood.
        """
        saved, loaded = (Trainer(TINY, seed) for seed in (1, 2))
        saved.progress = Progress(steps=2, tokens=3, taken={512: 9}, stream="s", decay=decay)
        saved.muon.buffers[0].fill_(0.5)

        saved.save(tmp_path / "run.pt")
        loaded.load(tmp_path / "run.pt")

        assert saved.progress == loaded.progress
        assert torch.equal(saved.muon.buffers[0], loaded.muon.buffers[0])
        for name, weight in saved.model.state_dict().items():
            assert torch.equal(weight, loaded.model.state_dict()[name]), name

    def test_other_shape_is_refused(self, tmp_path):
        """
        A checkpoint of another shape is named as such before anything is loaded.
        """
        Trainer(TINY, 1).save(tmp_path / "run.pt")

        with pytest.raises(ValueError, match="holds another shape"):
            Trainer(ModelConfig(vocab_size=8, num_layers=1), 1).load(tmp_path / "run.pt")


class TestStartFromExportedWeights:
    @pytest.fixture
    def exported(self, tmp_path) -> Path:
        """An exported model with half the key-value heads, and the record of its run."""
        trainer = Trainer(TINY, 3)
        for weight in trainer.model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        trainer.progress = Progress(steps=4, tokens=70, taken={512: 9}, stream="s")
        export(trainer.model, tmp_path)
        trainer.write_record(tmp_path)
        return tmp_path

    def test_model_with_more_key_value_heads_computes_the_same(self, exported):
        """
        Weights with fewer key-value heads are shared out to more, and give the same logits.
        """
        trainer = Trainer(GROWN, 1)
        trainer.start_from(exported)
        ids = torch.arange(20).remainder(GROWN.vocab_size)[None]
        with torch.inference_mode():
            expected = load_exported(exported)(ids)
            torch.testing.assert_close(trainer.model(ids), expected)

    def test_run_goes_on_in_the_text_and_warms_up_again(self, exported):
        """
        The run counts on from the tokens and windows of the record, and its rate rises anew.
        """
        trainer = Trainer(GROWN, 1)
        trainer.start_from(exported)
        progress = trainer.progress
        assert (4, 70, 70) == (progress.steps, progress.tokens, progress.began)
        assert ({512: 9}, "s") == (progress.taken, progress.stream)
        seen = progress.began + WARMUP_TOKENS // 2
        assert 0.5 == rate_factor(seen, None, began=progress.began)

    def test_other_shape_is_refused(self, exported):
        """
        Weights of another shape are named as such before anything is loaded.
        """
        with pytest.raises(ValueError, match="has another shape"):
            Trainer(replace(GROWN, hidden_size=16), 1).start_from(exported)


class TestShape:
    def test_two_and_four_ranks_can_share_it(self):
        """
        Heads, key-value heads and all widths divide by four.
        """
        shape = ModelConfig()
        sizes = (
            shape.num_heads,
            shape.num_kv_heads,
            shape.hidden_size,
            shape.intermediate_size,
            shape.vocab_size,
        )

        assert [0] * 5 == [size % 4 for size in sizes]


class TestAttention:
    @pytest.mark.parametrize("length", [1, 2, 5, 8])
    def test_halves_give_what_the_whole_gives(self, length):
        """
        Leaving out the scores that are masked anyway changes no result, at any length.
        """
        random = torch.Generator().manual_seed(1)
        query = torch.randn(2, 4, length, 8, generator=random)
        key, value = torch.randn(2, 2, 2, length, 8, generator=random)

        halves = attend_in_halves(query, key, value)

        torch.testing.assert_close(halves, attend(query, key, value))


class TestCorpus:
    @pytest.mark.parametrize(("shared", "kept"), [(9, True), (10, False), (20, False)])
    def test_near_copy_of_held_out_file_is_left_out(self, shared, kept):
        """
        A training file goes when ten long lines, half of its own, are those of a held-out file.
        """
        lines = [f"value_{number} = compute_something({number})" for number in range(20)]
        others = [f"other_{number} = compute_something({number})" for number in range(20 - shared)]
        held = source_file("held", lines, is_held_out=True)
        near = source_file("near", lines[:shared] + others, is_held_out=False)
        far = source_file("far", ["x = 1"], is_held_out=False)

        names = [file.name for file in without_near_copies([held, near, far])]

        assert ["held", *["near"] * kept, "far"] == names


def source_file(name: str, lines: list[str], *, is_held_out: bool) -> SourceFile:
    return SourceFile(source="s", name=name, text="\n".join(lines), is_held_out=is_held_out)


class TestDraw:
    @pytest.mark.parametrize(
        ("logits", "seen", "penalty", "expected"),
        [
            pytest.param([3.0, 2.9, 0.0], [0], 1.0, 0, id="off"),
            pytest.param([3.0, 2.9, 0.0], [0, 0], 1.15, 1, id="positive-divided-once"),
            pytest.param([-1.0, -1.1, -9.0], [0], 1.15, 1, id="negative-multiplied"),
        ],
    )
    def test_repetition_penalty_lowers_tokens_seen(self, logits, seen, penalty, expected):
        """
        A token of prompt or output loses to a near rival, whatever the sign of its logit.
        """
        sampling = Sampling(repetition_penalty=penalty)

        assert expected == draw(torch.tensor(logits), seen, 1, sampling, torch.Generator())

    def test_frequency_penalty_counts_the_output_alone(self):
        """
        A token loses once for each time it is in the output; the prompt does not count.
        """
        logits = torch.tensor([3.0, 2.0, 0.0])
        sampling = Sampling(frequency_penalty=0.4)
        drawn = [
            draw(logits, seen, 2, sampling, torch.Generator())
            for seen in ([0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0])
        ]
        assert [0, 0, 1] == drawn

    def test_min_p_leaves_unlikely_tokens_out(self):
        """
        Tokens below the given share of the likeliest one's probability are never drawn.
        """
        logits = torch.tensor([0.5, 0.3, 0.2]).log()
        sampling = Sampling(temperature=1.0, min_p=0.5)
        random = torch.Generator().manual_seed(1)

        assert {0, 1} == {draw(logits, [], 0, sampling, random) for _ in range(200)}


class TestCompletionRules:
    @pytest.mark.parametrize(
        ("text", "clean", "cut"),
        [
            pytest.param("    a = 1\n    b = 2\n    return 1\n", True, True, id="three"),
            pytest.param("    a = 1\n    return 1\n", False, False, id="two"),
            pytest.param("    if a:\n        b = 2\n        c = 3\n", True, True, id="nested"),
            pytest.param("    a = b = 1\n" * 3 + "    x = [\n", True, True, id="open-bracket"),
            pytest.param("    a = 1\n" * 3 + "    x = = 2\n", False, True, id="invalid-later"),
            pytest.param("    x = = 2\n" + "    a = 1\n" * 3, False, False, id="invalid-first"),
            pytest.param("    # only a comment\n", False, False, id="no-statement"),
            pytest.param("    x = [\n        1,\n", False, False, id="never-finished"),
            pytest.param("    a = 1\n" * 3 + "    retu", True, True, id="half-line"),
        ],
    )
    def test_only_unfinished_ends_are_forgiven(self, text, clean, cut):
        """
        A text may stop early, must hold three new statements, and is clean only without errors.
        """
        prompt = 'def f():\n    """Doc."""\n'
        completion = Completion(ids=[], text=text, has_ended=False)

        assert (clean, cut) == (is_clean(prompt, completion), is_cut_clean(prompt, completion))

    @pytest.mark.parametrize(("times", "expected"), [(4, False), (5, True)])
    def test_loop_is_six_tokens_more_than_four_times(self, times, expected):
        """
        Six tokens in a row may come four times; the fifth makes a loop.
        """
        ids = [token for number in range(times) for token in (1, 2, 3, 4, 5, 6, 10 + number)]

        assert expected == loops(ids)

    def test_short_text_has_no_loop(self):
        """
        A text of fewer than six tokens cannot loop.
        """
        assert not loops([1] * 5)


class TestCard:
    def test_transcripts_replace_what_stood_between_the_marks(self):
        """
        Text before and after the marks stays, what is between them is new.
        """
        card = f"before\n{TRANSCRIPTS_BEGIN}\nold\n{TRANSCRIPTS_END}\nafter\n"

        text = with_transcripts(card, "new")

        assert f"before\n{TRANSCRIPTS_BEGIN}\n\nnew\n{TRANSCRIPTS_END}\nafter\n" == text

    def test_card_without_marks_is_refused(self):
        """
        A card that has no place for transcripts is named as the mistake, not left as it is.
        """
        with pytest.raises(ValueError, match="the model card lacks"):
            with_transcripts("no marks", "new")
