"""Training of the bundled model on its own completions: what is kept, marked, packed, learned."""

import pytest
import torch

from deploy.models.training.completions import (
    Completion,
    Prompt,
    choose_prompts,
    training_heads,
    validation_heads,
)
from deploy.models.training.corpus import SourceFile
from deploy.models.training.loss import unlikelihood_loss
from deploy.models.training.refine import (
    SAMPLINGS,
    Example,
    Mark,
    Rows,
    Sample,
    batches_of,
    examples,
    pack,
    parse_arguments,
    repeated,
    samplings_of,
    step,
)
from deploy.models.training.tokenizer import EOS_ID, train_tokenizer
from deploy.models.training.train import Trainer
from tests.deploy.test_training import TINY

NEWLINE = 9
GRAM = [2, 3, 4, 5, 6, 7]
CONTEXT, TEXT, LEARNED, UNLEARNED = Mark


def sample(ids: list[int], text: str, *, has_ended: bool = True) -> Sample:
    return Sample(
        prompt=Prompt(location="a/b.py:1", text="def f():\n"),
        prompt_ids=[0, 8],
        completion=Completion(ids=ids, text=text, has_ended=has_ended),
    )


class TestHeads:
    @pytest.fixture
    def files(self) -> list[SourceFile]:
        """Ten files of three functions, of which every second file is held out."""
        return [
            SourceFile(
                source="a",
                name=f"a/{number}.py",
                text="\n".join(
                    f"def f{number}_{position}(a):\n    b = a\n    c = b\n    d = c\n    return d\n"
                    for position in range(3)
                ),
                is_held_out=bool(number % 2),
            )
            for number in range(10)
        ]

    def test_training_prompts_come_from_training_files_alone(self, files):
        """
        No head of a held-out file is sampled for training; all others are, once each.
        """
        tokenizer = train_tokenizer(file.text for file in files)

        found = list(training_heads([*files, *files], tokenizer))

        names = sorted(head.location.partition(":")[0] for head in found)
        assert [f"a/{number}.py" for number in (0, 2, 4, 6, 8) for _ in range(3)] == names

    def test_later_run_goes_on_after_the_heads_of_earlier_ones(self, files):
        """
        Skipping as many heads as were completed gives the very next ones, and past the end none.
        """
        tokenizer = train_tokenizer(file.text for file in files)

        first = list(training_heads(files, tokenizer))
        rest = list(training_heads(files, tokenizer, skipped=4))

        assert first[4:] == rest
        assert [] == list(training_heads(files, tokenizer, skipped=len(first)))

    def test_validation_prompts_are_held_out_and_not_evaluated(self, files):
        """
        Settings are chosen by heads of held-out files that are not in the evaluation.
        """
        tokenizer = train_tokenizer(file.text for file in files)

        found = {head.location for head in validation_heads(files, tokenizer)}

        evaluated = {prompt.location for prompt in choose_prompts(files)}
        assert 5 == len(found)
        assert not found & evaluated
        assert all(int(location[2]) % 2 for location in found)


class TestExamples:
    @pytest.mark.parametrize(("times", "places"), [(2, []), (3, [19]), (4, [19, 26])])
    def test_token_that_completes_third_gram_is_a_repetition(self, times, places):
        """
        Six tokens in a row may come twice; what ends them the third time on is named.
        """
        ids = [token for number in range(times) for token in (*GRAM, 10 + number)]

        assert places == repeated(ids)

    def test_good_sample_is_learned_after_its_prompt(self):
        """
        All tokens of a completion are learned, its end too, and none of its prompt.
        """
        text = "    a = 1\n    b = 2\n    return a\n"

        found = examples([sample([5, NEWLINE, 6], text)], NEWLINE)

        assert [
            Example(ids=[0, 8, 5, NEWLINE, 6, EOS_ID], marks=[CONTEXT] * 2 + [LEARNED] * 4)
        ] == (found)

    def test_line_cut_by_the_limit_is_not_learned(self):
        """
        Of a completion that the token limit stopped only the whole lines are learned.
        """
        text = "    a = 1\n    b = 2\n    c = 3\n    retu"

        found = examples([sample([5, NEWLINE, 6], text, has_ended=False)], NEWLINE)

        assert [Example(ids=[0, 8, 5, NEWLINE], marks=[CONTEXT] * 2 + [LEARNED] * 2)] == found

    def test_text_that_does_not_parse_is_left_out(self):
        """
        A completion with an error that does not repeat itself teaches nothing.
        """
        assert [] == examples([sample([5, NEWLINE, 6], "    a = = 1\n")], NEWLINE)

    def test_repetition_is_unlearned_even_in_text_that_parses(self):
        """
        Only the tokens that complete a repetition are marked, as what is to be unlearned.
        """
        ids = [*GRAM, 10, *GRAM, 11, *GRAM, 12]
        text = "    a = 1\n    b = 2\n    return a\n"

        (found,) = examples([sample(ids, text)], NEWLINE)

        assert [0, 8, *ids] == found.ids
        assert [CONTEXT] * 21 + [UNLEARNED] + [CONTEXT] == found.marks

    def test_half_as_many_repetitive_samples_as_good_ones_are_used(self):
        """
        Unlearned tokens stay the smaller part, however often the model repeats itself.
        """
        good = sample([5], "    a = 1\n    b = 2\n    return a\n")
        looping = sample([*GRAM, 10] * 3, "    a\n")

        found = examples([looping, good] * 4, NEWLINE)

        assert [False] * 4 + [True] * 2 == [UNLEARNED in example.marks for example in found]


class TestRounds:
    def test_rounds_after_the_last_sample_as_it_does(self):
        """
        Each round has its own ways of sampling, and those of the last serve all later ones.
        """
        count = len(SAMPLINGS)

        assert list(SAMPLINGS) == [samplings_of(number) for number in range(count)]
        assert SAMPLINGS[-1] == samplings_of(count) == samplings_of(count + 5)

    def test_run_starts_at_the_first_round_unless_told(self):
        """
        Without options a run is the first; a later one says what came before it, and its rate.
        """
        required = ["--work=w", "--from-model=m", "--export=e"]
        later = ["--first-round=2", "--skip-heads=5400", "--peak=0.05"]

        first, third = parse_arguments(required), parse_arguments([*required, *later])

        assert (0, 0, 0.08) == (first.first_round, first.skip_heads, first.peak)
        assert (2, 5400, 0.05) == (third.first_round, third.skip_heads, third.peak)


class TestRows:
    def test_examples_stay_whole_in_rows_of_equal_length(self):
        """
        Each example goes into the first row with room for it; what is left is padding.
        """
        found = [
            Example(ids=[number] * size, marks=[LEARNED] * size)
            for number, size in ((2, 3), (3, 3), (4, 2))
        ]

        rows = pack(found, 5)

        assert [[2, 2, 2, 4, 4], [3, 3, 3, EOS_ID, EOS_ID]] == rows.ids.tolist()
        assert [[LEARNED] * 5, [LEARNED] * 3 + [CONTEXT] * 2] == rows.marks.tolist()

    def test_example_longer_than_a_row_is_refused(self):
        """
        An example that would have to be cut is named as the mistake.
        """
        with pytest.raises(ValueError, match="an example of 6 tokens does not fit in 5"):
            pack([Example(ids=[2] * 6, marks=[LEARNED] * 6)], 5)

    def test_rest_smaller_than_a_batch_is_left_out(self):
        """
        Rows are taken in their order, as many at a time as a step has room for.
        """
        ids = torch.arange(5)[:, None]

        taken = [part.ids.flatten().tolist() for part in batches_of(Rows(ids=ids, marks=ids), 2)]

        assert [[0, 1], [2, 3]] == taken


class TestLosses:
    @pytest.mark.parametrize("logit", [-3.0, 0.0, 40.0])
    def test_unlikelihood_is_minus_log_of_the_rest(self, logit):
        """
        The loss is that of all other tokens together, also where the token is all but certain.
        """
        hidden, weight = torch.ones(1, 1), torch.tensor([[logit], [0.0], [1.0]])

        loss = unlikelihood_loss(hidden, weight, torch.tensor([0]))

        wide = weight.double().flatten().softmax(0)
        torch.testing.assert_close(-wide[1:].sum().log().float(), loss)

    def test_certain_token_still_has_a_gradient(self):
        """
        A token whose probability rounds to 1 is pushed down all the same.
        """
        weight = torch.tensor([[60.0], [0.0]], requires_grad=True)

        unlikelihood_loss(torch.ones(1, 1), weight, torch.tensor([0])).backward()

        assert weight.grad is not None
        assert 0.9 < float(weight.grad[0])

    @pytest.mark.slow
    def test_step_makes_learned_tokens_likelier_and_unlearned_ones_less_likely(self):
        """
        Steps move the probability of marked tokens the way of their marks.
        """
        trainer = Trainer(TINY, 1)
        text = Rows(ids=torch.tensor([[0, 7, 8, 9, 10]]), marks=torch.full((1, 5), TEXT))
        marks = torch.tensor([[CONTEXT, LEARNED, CONTEXT, UNLEARNED, CONTEXT]])
        samples = Rows(ids=torch.tensor([[0, 3, 4, 5, 6]]), marks=marks)

        with torch.compiler.set_stance("force_eager"):
            losses = [step(trainer, text, samples, 0.5) for _ in range(8)]

        assert all(last < first for first, last in zip(losses[0], losses[-1], strict=True))
        assert (8, 8 * 8) == (trainer.progress.steps, trainer.progress.tokens)
