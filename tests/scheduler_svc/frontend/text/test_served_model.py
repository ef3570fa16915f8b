"""The model that is served now."""

import asyncio
import threading

from scheduler_svc.frontend.text.served_model import ServedModel
from scheduler_svc.frontend.text.tokenizer import TextModel
from tests.scheduler_svc.frontend.fake_core import model, until, within


class TestServedModel:
    async def test_request_that_leaves_while_it_loads_harms_no_other(self, model_dir, monkeypatch):
        """
        Requests wait for the same loading, and one that is cancelled does not cancel it.
        """
        go, load = threading.Event(), TextModel.load

        def slow_load(directory):
            go.wait()
            return load(directory)

        monkeypatch.setattr(TextModel, "load", slow_load)
        served, told = ServedModel(), []
        served.load(model(model_dir), lambda: told.append(served.is_loaded))
        leaving, staying = (asyncio.create_task(served.get()) for _ in range(2))
        await asyncio.sleep(0)
        assert not served.is_loaded
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        go.set()
        assert "rev-1" == (await within(staying)).model.revision
        await until(lambda: told)
        assert [True] == told
