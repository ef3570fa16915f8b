"""Table of the services' options: what is declared is what every reader of the table sees."""

from __future__ import annotations

import pytest

from executor_svc.config.settings import PROGRAM as EXECUTOR
from scheduler_svc.config.settings import PROGRAM as SCHEDULER
from tandem.settings.options import FILE, as_json, keys_of, options_of, table_of

PROGRAMS = {"executor": EXECUTOR, "scheduler": SCHEDULER}


class TestTable:
    def test_file_has_what_the_services_declare(self):
        """
        The committed table is what `python protos/generate.py` writes.
        """
        declared = {service: program.table for service, program in PROGRAMS.items()}
        assert as_json(declared) == FILE.read_text(encoding="utf-8")

    @pytest.mark.parametrize("service", PROGRAMS)
    def test_read_back_it_is_what_was_declared(self, service):
        """
        Options read from the table equal those of the service, and each has a text.
        """
        assert PROGRAMS[service].table == table_of(service)
        assert all(option.help for option in options_of(service))

    @pytest.mark.parametrize("service", PROGRAMS)
    def test_no_name_means_two_options(self, service):
        """
        Names and aliases of a service's options are all different.
        """
        names = [name for one in options_of(service) for name in (one.name, *one.aliases)]
        assert len(set(names)) == len(names)


class TestAliases:
    def test_other_systems_names_of_limits_are_known(self):
        """
        The spellings of vLLM, SGLang and Megatron Core mean the same limits in both services; the
        executor also knows theirs of the ranks of a model.
        """
        expected = {
            "max_num_batched_tokens": "max_total_tokens",
            "max_running_requests": "max_batch_size",
            "max_requests": "max_batch_size",
            "block_size_tokens": "block_size",
            "max_sequence_length": "max_model_len",
        }
        ranks = {
            "tensor_parallel_size": "tp_size",
            "tensor_model_parallel_size": "tp_size",
            "pipeline_parallel_size": "pp_size",
            "pipeline_model_parallel_size": "pp_size",
        }
        assert expected | ranks == EXECUTOR.aliases
        assert expected.items() <= SCHEDULER.aliases.items()

    def test_other_names_of_scheduling_are_known(self):
        """
        The short names of scheduling options, and those of the core, mean the same options.
        """
        limits = EXECUTOR.aliases
        assert {
            "prefix_caching": "enable_prefix_caching",
            "chunked_prefill": "enable_chunked_prefill",
            "eviction": "prefix_caching_eviction_policy",
            "overlength": "overlength_policy",
            "long_prefill_token_threshold": "long_prefill_threshold",
            "track_token_events": "track_generated_token_events",
            "track_paused_events": "track_paused_request_events",
            "prefix_caching_coordinator_policy": "routing",
        } == {name: meant for name, meant in SCHEDULER.aliases.items() if name not in limits}


class TestSharedFile:
    @pytest.mark.parametrize("service", PROGRAMS)
    def test_every_key_of_the_other_service_is_its_own_or_foreign(self, service):
        """
        A file for both services may name the other's options by any of their names; an option that
        both have is no foreign one.
        """
        program = PROGRAMS[service]
        own = {*program.schema.model_fields, *program.aliases}
        for other in PROGRAMS.keys() - {service}:
            assert {*keys_of(other)} - own == {*program.foreign_keys}

    def test_names_and_aliases_of_one_service_are_foreign_to_the_other(self):
        """
        Options of any group count, the limits that both services obey do not.
        """
        assert {"frontends", "lost_after_s", "executor", "prefix_caching"} <= {
            *EXECUTOR.foreign_keys
        }
        assert {"model", "device", "stop_grace_s", "num_threads"} <= {*SCHEDULER.foreign_keys}
        shared = {"block_size", "max_requests", "buffer_size_gb", "max_num_seqs", "listen"}
        assert not shared & {*EXECUTOR.foreign_keys, *SCHEDULER.foreign_keys}
