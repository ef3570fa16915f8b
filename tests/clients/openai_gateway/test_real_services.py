"""OpenAI's and LangChain's clients against real services with the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import jinja2
import openai
import pytest
from langchain_openai import ChatOpenAI
from tokenizers import Tokenizer

from tandem_client import Client
from tests.clients.openai_gateway.serving import gateway
from tests.e2e.cluster import BUNDLED_MODEL, Cluster, environment
from tests.waiting import wait_until

PROMPT = "def read_json(path: str) -> dict:"
HI = [{"role": "user", "content": "Return the sum of two numbers."}]
MODEL = "tandem-py"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_json",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
TOOL_MESSAGES = [
    {"role": "user", "content": "What is in the file?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "read_json", "arguments": '{"path": "a.json"}'},
            }
        ],
    },
    {"role": "tool", "content": "[1, 2]", "tool_call_id": "c1"},
]
ARGUMENTS = "call.function.arguments"
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}# tool {{ tool | tojson }};{% endfor %}"
    "{% for message in messages %}# {{ message.role }} {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    f"{{{{ call.id }}}} {{{{ call.function.name }}}}({{{{ {ARGUMENTS} | tojson }}}})"
    "{% endfor %};{% endfor %}"
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The bundled model with room for few requests, so that the queue can be filled."""
    folder = tmp_path_factory.mktemp("gateway")
    running = Cluster(BUNDLED_MODEL, folder, ["--max-total-tokens=256"], ["--max-num-seqs=8"])
    try:
        running.start_executor()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def url(cluster):
    with gateway(cluster.address) as served:
        yield f"{served}/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as connected:
        yield connected


def direct(cluster, **options):
    """Return the same completion without the gateway."""
    with Client(cluster.address) as client:
        return client.complete(PROMPT, **options)


class TestOpenAI:
    def test_completion_is_that_of_the_client_library(self, cluster, client):
        """
        A completion has the text, the counts and the log probabilities of Tandem's own client.
        """
        expected = direct(cluster, max_tokens=24, seed=5, logprobs=2)
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, seed=5, logprobs=2
        )
        assert expected.text == answer.choices[0].text
        assert "length" == answer.choices[0].finish_reason
        assert expected.usage.output_tokens == answer.usage.completion_tokens
        assert expected.model_revision == answer.system_fingerprint
        found = answer.choices[0].logprobs
        assert [one.logprob for one in expected.logprobs] == found.token_logprobs
        assert [one.text for one in expected.logprobs] == found.tokens

    def test_bytes_of_tokens_are_the_text(self, client):
        """
        Bytes of a chat's tokens, joined, are the text, characters that tokens split included.
        """
        choice = client.chat.completions.create(
            model=MODEL, messages=HI, max_completion_tokens=24, seed=3, logprobs=True
        ).choices[0]
        told = [byte for one in choice.logprobs.content for byte in one.bytes or []]
        assert choice.message.content == bytes(told).decode(errors="replace")

    def test_stream_is_the_whole(self, client):
        """
        A stream with a seed has the text of the whole answer, and the usage at its end.
        """
        options = {"model": MODEL, "messages": HI, "max_completion_tokens": 24, "seed": 3}
        whole = client.chat.completions.create(**options)
        chunks = list(
            client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
        assert whole.choices[0].message.content == "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens

    def test_choices_differ_and_the_first_is_the_only_one(self, client):
        """
        With n choices the first is that of a request for one.
        """
        options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "seed": 7, "temperature": 1}
        one = client.completions.create(**options)
        three = client.completions.create(**options, n=3)
        assert one.choices[0].text == three.choices[0].text
        assert 3 == len({choice.text for choice in three.choices})

    def test_stop_string_ends_the_output_before_it(self, client):
        """
        The output ends before a stop string, and says which it was.
        """
        text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
        stop = text.choices[0].text[10:14]
        cut = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop]
        )
        assert text.choices[0].text.partition(stop)[0] == cut.choices[0].text
        assert ("stop", stop) == (cut.choices[0].finish_reason, cut.choices[0].stop_reason)

    async def test_many_asynchronous_streams(self, url):
        """
        Streams of one client run side by side; each has its own output.
        """
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=5) as client:

            async def read(seed):
                chunks = await client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=12, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in chunks])

            first = await asyncio.gather(*(read(seed) for seed in range(6)))
            assert first == [await read(seed) for seed in range(6)]

    @pytest.mark.parametrize(
        ("param", "options"),
        [
            ("temperature", {"temperature": 3}),
            ("top_p", {"top_p": 1.5}),
            ("max_tokens", {"max_tokens": 100_000}),
            ("n", {"n": 17}),
            ("min_p", {"extra_body": {"min_p": 2}}),
        ],
    )
    def test_value_out_of_range_is_named(self, client, param, options):
        """
        A value that the scheduler refuses is 400 with OpenAI's name of the parameter.
        """
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt=PROMPT, **options)
        assert param == refused.value.param

    def test_full_queue_is_429_and_waits_are_retried(self, cluster, url):
        """
        More requests than there is room for are refused with 429; a client that retries is served.
        """
        with (
            cluster.held(),
            ThreadPoolExecutor(8) as pool,
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            ask = client.completions.create
            running = [pool.submit(ask, model=MODEL, prompt=PROMPT, max_tokens=2) for _ in range(8)]
            wait_until(lambda: 8 == cluster.num_requests(), "eight requests")
            with pytest.raises(openai.RateLimitError) as refused:
                ask(model=MODEL, prompt=PROMPT)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            cluster.gate.open()
            assert all(answer.result().choices for answer in running)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=3) as client:
            assert client.completions.create(model=MODEL, prompt=PROMPT).choices

    def test_client_that_gives_up_leaves_nothing(self, cluster, url):
        """
        A time-out of the client ends its request at the scheduler.
        """
        with (
            cluster.held(),
            openai.OpenAI(base_url=url, api_key="none", timeout=0.5, max_retries=0) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=500)
        wait_until(lambda: 0 == cluster.num_requests(), "the request to end")


class TestTools:
    @pytest.fixture
    def client_of_tools(self, tmp_path):
        """A client of a gateway before the bundled model with a template that writes tools."""
        model = shutil.copytree(BUNDLED_MODEL, tmp_path / MODEL)
        (model / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
        running = Cluster(model, tmp_path, ["--dtype=float32"], [])
        try:
            running.start_executor()
            with (
                gateway(running.address) as served,
                openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0) as client,
            ):
                yield client
        finally:
            running.close()

    def test_tools_are_in_the_prompt_that_is_computed(self, client_of_tools):
        """
        A chat with tools, a call of one and its answer has the tokens, one for one, that the model
        computes for the template as jinja2 writes it here: as many of the prompt, and the same
        output with the same log probabilities. Without tools it has others.
        """
        options = {"model": MODEL, "temperature": 0, "logprobs": True}
        chats = client_of_tools.chat.completions
        sent = {"messages": TOOL_MESSAGES, "max_completion_tokens": 16, **options}
        chat = chats.create(**sent, tools=TOOLS, tool_choice="auto")
        prompt = rendered_ids(TOOL_MESSAGES, TOOLS)
        expected = client_of_tools.completions.create(
            prompt=prompt, max_tokens=16, **options | {"logprobs": 1}
        )
        assert len(prompt) == chat.usage.prompt_tokens
        assert expected.choices[0].text == chat.choices[0].message.content
        assert expected.choices[0].logprobs.token_logprobs == [
            one.logprob for one in chat.choices[0].logprobs.content
        ]

        without = chats.create(**sent)
        assert len(rendered_ids(TOOL_MESSAGES, None)) == without.usage.prompt_tokens
        assert without.usage.prompt_tokens < chat.usage.prompt_tokens


def rendered_ids(messages: list[dict], tools: list[dict] | None) -> list[int]:
    """Return the ids of the template's text, rendered without the project's code."""
    environment = jinja2.Environment()
    environment.filters |= {"tojson": json.dumps, "parsed": json.loads}
    # Templates get arguments of calls as objects, where OpenAI's API has a text.
    source = TOOLS_TEMPLATE.replace(ARGUMENTS, f"{ARGUMENTS} | parsed")
    text = environment.from_string(source).render(
        messages=messages, tools=tools, bos_token="<|begin|>"
    )
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


class TestLangChain:
    @pytest.fixture
    def chat(self, url):
        """LangChain's model for OpenAI's API."""
        return ChatOpenAI(
            base_url=url, api_key="none", model=MODEL, max_tokens=24, seed=3, max_retries=0
        )

    def test_invoke_answers_with_usage(self, chat):
        """
        An answer has its text and its tokens.
        """
        answer = chat.invoke("Return the sum of two numbers.")
        assert answer.content
        assert answer.usage_metadata["output_tokens"] > 0
        assert MODEL == answer.response_metadata["model_name"]

    def test_stream_is_the_answer(self, chat):
        """
        The chunks of a stream are those of the whole answer.
        """
        prompt = "Return the sum of two numbers."
        assert chat.invoke(prompt).content == "".join(one.content for one in chat.stream(prompt))

    async def test_batch_of_conversations(self, chat):
        """
        Several conversations, with a system message, are answered side by side.
        """
        conversations = [[("system", "Be brief."), ("user", f"Add {n}.")] for n in range(3)]
        assert 3 == len([one for one in await chat.abatch(conversations) if one.content])

    def test_logprobs_are_found(self, chat):
        """
        Log probabilities arrive in the answer's metadata.
        """
        answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Add one.")
        tokens = answer.response_metadata["logprobs"]["content"]
        assert 2 == len(tokens[0]["top_logprobs"])


class TestUp:
    def test_one_command_serves_both(self, tmp_path):
        """
        `tandem up --openai` starts a gateway with the services, tells its address, and stops it.
        """
        listen = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")]
        command = [sys.executable, "-m", "tandem_client", "up", "--openai=127.0.0.1:0", *listen]
        with subprocess.Popen(
            [*command, f"--log-dir={tmp_path}"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                said = ""
                while "Ctrl-C stops it" not in said:
                    line = process.stdout.readline()
                    assert line, said
                    said += line
                address = re.search(r"OpenAI +(http://\S+)", said)[1]
                models = httpx.get(f"{address}/models", trust_env=False).json()
                assert MODEL == models["data"][0]["id"]
            finally:
                process.terminate()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/models", trust_env=False)
        assert '"error"' not in (tmp_path / "gateway.log").read_text()
