"""A sampling parameter reaches the executor, whatever carries it on the way."""

from __future__ import annotations

from dataclasses import fields

import pytest

from scheduler_svc.frontend.request.sampling import sampling_message as told_message
from tandem.executor.v1.executor_service_pb2 import GenerationDefaults
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import request_pb2
from tandem.inference.v1.stream_pb2 import Started
from tandem.link.codec.sampling_codec import read_sampling, sampling_message
from tandem.sampling_params import MODEL_DEFAULT_PARAMS
from tandem_client.params import GenerateOptions, ResolvedParams, params_from_proto
from tandem_embedded import GenerationParams
from tests.scheduler_svc.frontend.calls import stub_of
from tests.scheduler_svc.frontend.fake_core import model, running_frontend, serve, within

ASKED = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.25,
    "seed": 11,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.75,
    "presence_penalty": -0.5,
    "min_p": 0.125,
    "logit_bias": {3: -2.0},
    "allowed_token_ids": (3, 7),
}
"""Every sampling parameter with a value that nothing has by default; exact in float32."""


class TestCarrying:
    def test_each_parameter_of_the_contract_is_tried(self):
        """
        A parameter that is added to the contract fails here until it is carried.
        """
        assert {field.name for field in request_pb2.SamplingParams.DESCRIPTOR.fields} == set(ASKED)

    def test_each_parameter_is_told_and_both_clients_take_it(self):
        """
        The options of both clients have every parameter; Started has the request's own message.
        """
        assert "SamplingParams" == Started.DESCRIPTOR.fields_by_name["sampling"].message_type.name
        assert set(ASKED) <= set(GenerateOptions.__annotations__)
        assert set(ASKED) <= {field.name for field in fields(ResolvedParams)}
        assert set(ASKED) <= {field.name for field in fields(GenerationParams)}

    @pytest.mark.parametrize("name", ASKED)
    def test_parameter_is_told_to_both_clients(self, name):
        """
        A client hears the value in force, and an embedded engine sends its executor the same one.
        """
        params = GenerationParams(**{name: ASKED[name]}).row_sampling(ASKED["seed"], ())
        told = params_from_proto(told_message(params), request_pb2.StoppingParams())
        assert getattr(told, name) == ASKED[name]

    def test_models_recommend_what_executors_describe(self):
        """
        The parameters with a model's default are those of an executor's description.
        """
        described = GenerationDefaults.DESCRIPTOR.fields_by_name
        assert set(MODEL_DEFAULT_PARAMS) == set(described)

    @pytest.mark.parametrize("name", ASKED)
    async def test_parameter_arrives_as_it_was_asked_for(self, tmp_path, model_dir, name):
        """
        Alone among defaults, a parameter comes from the client's request to the executor's slot.
        """
        request = pb.GenerateRequest(
            text="hello", sampling=request_pb2.SamplingParams(**{name: ASKED[name]})
        )
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir))
            call = stub_of(frontend).Generate(request)
            submit = await within(frontend.core.submits.get())
            call.cancel()
        sent = sampling_message(submit.sampling)
        arrived = getattr(read_sampling(sent, "sampling"), name)
        asked = ASKED[name]
        assert arrived == (tuple(asked.items()) if isinstance(asked, dict) else asked)
