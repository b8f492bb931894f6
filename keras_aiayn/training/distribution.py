"""One place for training on several devices: `start`, and what it gives, `Devices`.

A *replica* is a device that computes the gradients of its part of every global batch. How replicas
are made is each backend's own:

    jax          one process drives all devices of a machine by `keras.distribution`; several
                 machines are joined where JAX_NUM_PROCESSES (and JAX_COORDINATOR_ADDRESS and
                 JAX_PROCESS_ID, where no scheduler tells them) say so
    tensorflow   `MirroredStrategy` on a machine; with TF_CONFIG `MultiWorkerMirroredStrategy`
    torch        a process for each device, started by `launch.launch` or by torchrun

A process *feeds* the replicas that it drives. What a batch holds depends on none of this
(`data.batching`), so a run can go on with another number of devices.
"""

import atexit
import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import keras
import numpy as np

from keras_aiayn.config import TrainingConfig, TransformerConfig
from keras_aiayn.memory import keep_freed_memory
from keras_aiayn.training.launch import end_with_the_launcher

# Dropout of replica r draws from a seed this far from that of replica r - 1: torch's masks of
# seeds one apart are the same, one step later.
SEED_STEP = 7_919_000
# Torch gives up waiting for another process after so long. The others wait while one validates.
PATIENCE = timedelta(hours=2)
# A process that died is noticed after so long, where no connection breaks.
HEARTBEAT_SECONDS = 30


class Devices:
    """The devices of a run, as one of its processes sees them; as it stands, a single device.

    Attributes:
        rank: of this process, from 0. The first one writes files, and says what is to be said.
        processes: their number.
        replicas: devices that share a batch, those of all processes.
    """

    def __init__(self, rank: int = 0, processes: int = 1, replicas: int = 1):
        self.rank, self.processes, self.replicas = rank, processes, replicas

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def parts(self) -> range:
        """The replicas, of all, that this process feeds."""
        own = self.replicas // self.processes
        return range(self.rank * own, (self.rank + 1) * own)

    def check(self, model: TransformerConfig, training: TrainingConfig) -> None:
        """Refuses with a `ValueError` what the backend cannot do on these devices."""

    def scope(self) -> contextlib.AbstractContextManager:
        """Where the model and its optimizer are made and compiled."""
        return contextlib.nullcontext()

    def share(self, model: keras.Model) -> None:
        """Gives every replica the same weights and dropout of its own.

        To be called once the model has the weights to start with, and its optimizer is built.
        """

    def feed(self, dataset: Any) -> tuple[Any, int | None]:
        """What `fit` and `evaluate` take of a dataset of this process: it, and its steps."""
        return dataset, None

    def metrics(self, model: keras.Model) -> dict[str, float]:
        """The metrics since they were last reset, over all replicas."""
        results = model.get_metrics_result()
        return {name: float(keras.ops.convert_to_numpy(value)) for name, value in results.items()}

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """The sum over the processes of a vector of int32, which all of them give."""
        return numbers

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether any process has raised it."""
        return [bool(number) for number in self.total(np.array(flags, "int32"))]

    def first(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the first process; all get what it gives, as JSON keeps it.

        Where it fails, the first process raises that error, and the others end with status 2.
        """
        if self.processes == 1:
            return function()
        message = ""
        if not self.is_first:
            answer = json.loads(self._told(message))
            if "given" not in answer:
                raise SystemExit(2)  # why, the first process says
            return answer["given"]
        try:
            message = json.dumps({"given": function()})
        except BaseException:
            self._told(json.dumps({}))
            raise
        return json.loads(self._told(message))["given"]

    def _told(self, message: str) -> str:
        """The message of the first process, in all of them."""
        data = np.frombuffer(message.encode(), "uint8").astype("int32")
        (size,) = self.total(np.array([len(data) if self.is_first else 0], "int32"))
        told = self.total(data if self.is_first else np.zeros(size, "int32"))
        return told.astype("uint8").tobytes().decode()


# How weights are cut where devices share them: by the part of the variable's path that tells what
# it is. A product of matrices cut so needs no more than one sum, behind attention and behind the
# feed-forward network: the columns of the first factor lie where the rows of the second one do.
LAYOUT = {
    r".*/(query|key|value)/kernel": (None, "model"),
    r".*/(query|key|value)/bias": ("model",),
    r".*attention/output/kernel": ("model", None),
    r".*/inner/kernel": (None, "model"),
    r".*/inner/bias": ("model",),
    r".*/outer/kernel": ("model", None),
    r".*embedding/table/embeddings": ("model", None),
}
OPTIONAL_RULES = (r".*/(query|key|value)/bias",)  # attention has biases where asked for


class _Jax(Devices):
    """Devices under `keras.distribution`: JAX sees a global batch as one array."""

    def __init__(self, rank: int, processes: int, replicas: int, model_parallel: int):
        super().__init__(rank, processes, replicas)
        self.model_parallel = model_parallel

    def check(self, model: TransformerConfig, training: TrainingConfig) -> None:
        for name in (
            "vocabulary_size", "target_vocabulary_size", "intermediate_dim", "num_heads",
        ):  # fmt: skip
            size = getattr(model, name) or 0
            if size % self.model_parallel:
                raise ValueError(
                    f"`{name}` must be divisible by model_parallel={self.model_parallel}. "
                    f"Received: {size}"
                )

    def share(self, model: keras.Model) -> None:
        if self.model_parallel == 1:
            return
        # Keras says nothing where a rule matches no variable.
        for rule, axes in LAYOUT.items():
            cut = [
                variable
                for variable in model.trainable_variables
                if re.fullmatch(rule, variable.path) and tuple(variable.value.sharding.spec) == axes
            ]
            if not cut and rule not in OPTIONAL_RULES:
                raise ValueError(f"no weight was laid out by {rule}")

    def total(self, numbers: np.ndarray) -> np.ndarray:
        if self.processes == 1:
            return numbers
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(numbers)).sum(axis=0)

    def first(self, function: Callable[[], Any]) -> Any:
        def alone() -> Any:
            """Without the others, who would have to take part in making a variable."""
            shared = keras.distribution.distribution()
            keras.distribution.set_distribution(None)
            try:
                return function()
            finally:
                keras.distribution.set_distribution(shared)

        return super().first(alone)


class _TensorFlow(Devices):
    """Devices under a `tf.distribute` strategy."""

    def __init__(self, strategy: Any, rank: int = 0, processes: int = 1):
        super().__init__(rank, processes, strategy.num_replicas_in_sync)
        self._strategy = strategy

    def check(self, model: TransformerConfig, training: TrainingConfig) -> None:
        # Keras makes an update within a condition then, where replicas cannot be summed over.
        for asked, what in (
            (training.accumulation > 1, "accumulation"),
            (model.dtype == "mixed_float16", "mixed_float16"),
        ):
            if asked:
                raise ValueError(
                    f"{what} on several devices needs jax or torch. Received: tensorflow and "
                    f"{self.replicas} devices"
                )

    def scope(self) -> contextlib.AbstractContextManager:
        return self._strategy.scope()

    def share(self, model: keras.Model) -> None:
        for state in _dropout_states(model):
            own = self._strategy.experimental_local_results(state.value)
            for part, value in zip(self.parts, own, strict=True):
                value.assign(value + np.array([part * SEED_STEP, 0], "int32"))

    def feed(self, dataset: Any) -> tuple[Any, int | None]:
        import tensorflow as tf

        steps, own = int(dataset.cardinality()), len(self.parts)

        def by_replica(*batch: Any) -> Any:
            """A batch of this process as a dataset of the batches of its replicas."""
            parted = tf.nest.map_structure(
                lambda array: tf.reshape(array, [own, -1, tf.shape(array)[-1]]), batch
            )
            return tf.data.Dataset.from_tensor_slices(parted)

        parted = dataset.flat_map(by_replica) if own > 1 else dataset
        return self._strategy.distribute_datasets_from_function(lambda context: parted), steps

    def total(self, numbers: np.ndarray) -> np.ndarray:
        if self.processes == 1:
            return numbers
        import tensorflow as tf

        per_replica = self._strategy.run(self._summed, args=(tf.constant(numbers),))
        return self._strategy.experimental_local_results(per_replica)[0].numpy()

    @functools.cached_property
    def _summed(self) -> Any:
        """In a replica: the sum over the processes."""
        import tensorflow as tf

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
        def summed(numbers: Any) -> Any:
            context = tf.distribute.get_replica_context()
            # Each process counts once, however many replicas it drives.
            counts = context.replica_id_in_sync_group == self.parts.start
            own = tf.where(counts, numbers, tf.zeros_like(numbers))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return summed


class _Torch(Devices):
    """One device of as many processes as there are devices."""

    def __init__(self, rank: int, processes: int):
        super().__init__(rank, processes, replicas=processes)

    def share(self, model: keras.Model) -> None:
        import torch
        from torch import distributed

        for variable in [*model.variables, *model.optimizer.variables]:
            distributed.broadcast(variable.value.detach(), 0)
        for state in _dropout_states(model):
            state.assign(state.value + torch.tensor([self.rank * SEED_STEP, 0]).to(state.value))
        optimizer = model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # An update is made by all or by none, or those that made it would wait for the others.
            own_finite = optimizer.check_finite

            def all_finite(gradients: Sequence[Any]) -> Any:
                finite = own_finite(gradients).to(torch.int32)
                distributed.all_reduce(finite, distributed.ReduceOp.MIN)
                return finite.to(torch.bool)

            optimizer.check_finite = all_finite

    def metrics(self, model: keras.Model) -> dict[str, float]:
        variables = [variable for metric in model.metrics for variable in metric.variables]
        values = [variable.value.detach() for variable in variables]
        for variable, total in zip(variables, _summed_by_torch(values), strict=True):
            variable.assign(total)
        return super().metrics(model)

    def total(self, numbers: np.ndarray) -> np.ndarray:
        import torch
        from torch import distributed

        summed = torch.tensor(numbers)
        distributed.all_reduce(summed)
        return summed.numpy()


def _dropout_states(model: keras.Model) -> list[keras.Variable]:
    """The random states, (seed, calls), of the layers that draw."""
    return [state for state in model.non_trainable_variables if "seed_generator" in state.path]


def start(devices: int | None = None, *, model_parallel: int = 1) -> Devices:
    """Takes devices for a run. To be called before anything else is done with the backend.

    Args:
        devices: of this machine; all its accelerators by default, or where it has none its one
            CPU. More CPU devices than one share the machine: of use to try things.
        model_parallel: devices that share the weights of one replica, on JAX.

    Returns:
        The devices of this process.

    Raises:
        ValueError: where there are not so many, or it is too late to take them, or the backend
            cannot share weights.
    """
    for name, number in (("devices", devices), ("model_parallel", model_parallel)):
        if number is not None and number < 1:
            raise ValueError(f"`{name}` must be at least 1. Received: {number}")
    keep_freed_memory()  # which is too late once the backend has threads
    backend = keras.backend.backend()
    if backend == "jax":
        return _start_jax(devices, model_parallel)
    if model_parallel > 1:
        raise ValueError(
            f"only jax shares weights among devices. Received: model_parallel={model_parallel} on "
            f"{backend}"
        )
    return _start_tensorflow(devices) if backend == "tensorflow" else _start_torch(devices)


def _check_available(devices: int | None, available: int) -> int:
    if devices is not None and devices > available:
        raise ValueError(
            f"this machine has {available} devices for {keras.backend.backend()}, or it is too "
            f"late to take more. Received: devices={devices}"
        )
    return devices or available


def _check_all(devices: int | None, own: int) -> None:
    if devices not in (None, own):
        raise ValueError(
            f"of several processes each drives all the devices that it sees, {own} here. "
            f"Received: devices={devices}"
        )


def _start_jax(devices: int | None, model_parallel: int) -> Devices:
    import jax

    # CPU devices are counted when JAX is first used; accelerators are what they are.
    if devices and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
    processes = int(os.environ.get("JAX_NUM_PROCESSES", 1))
    if processes > 1 and not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        rank = os.environ.get("JAX_PROCESS_ID")
        jax.distributed.initialize(
            num_processes=processes,
            process_id=None if rank is None else int(rank),
            # Told who it is, JAX need not find out: under Slurm it would take one GPU of many.
            cluster_detection_method=None if rank is None else "deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    names = keras.distribution.list_devices()
    if processes > 1:
        _check_all(devices, jax.local_device_count())
    else:
        names = names[: _check_available(devices, len(names))]
    if len(names) % model_parallel or (processes > 1 and model_parallel > 1):
        raise ValueError(
            "`model_parallel` must divide the devices of one process. "
            f"Received: model_parallel={model_parallel}, {len(names)} devices, "
            f"{processes} processes"
        )
    if len(names) == 1:
        keras.distribution.set_distribution(None)  # of an earlier run
        return Devices()
    replicas = len(names) // model_parallel
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=names, auto_shard_dataset=False)
        if model_parallel == 1
        else _model_parallel(names, replicas)
    )
    return _Jax(jax.process_index(), processes, replicas, model_parallel)


def _model_parallel(names: list[str], replicas: int) -> keras.distribution.ModelParallel:
    mesh = keras.distribution.DeviceMesh(
        (replicas, len(names) // replicas), ["batch", "model"], names
    )
    layout = keras.distribution.LayoutMap(mesh)
    for rule, axes in LAYOUT.items():
        layout[rule] = axes
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
    )


def _start_tensorflow(devices: int | None) -> Devices:
    import tensorflow as tf

    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    if "TF_CONFIG" in os.environ:
        return _join_tensorflow(devices, kind)
    if kind == "CPU" and devices:
        (cpu,) = tf.config.list_physical_devices("CPU")
        with contextlib.suppress(RuntimeError):  # it is in use: there are as many as there are
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * devices
            )
    number = _check_available(devices, len(tf.config.list_logical_devices(kind)))
    if number == 1:
        return Devices()
    names = [f"{kind}:{i}" for i in range(number)]
    return _TensorFlow(tf.distribute.MirroredStrategy(names))


def _join_tensorflow(devices: int | None, kind: str) -> Devices:
    """This process among those that TF_CONFIG names."""
    import tensorflow as tf

    try:
        config = json.loads(os.environ["TF_CONFIG"])
        task, cluster = config["task"], config["cluster"]
        chiefs, workers = (len(cluster.get(role, [])) for role in ("chief", "worker"))
        rank = task["index"] + (chiefs if task["type"] == "worker" else 0)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"TF_CONFIG must name a cluster of workers and this task ({error!r}). "
            f"Received: {os.environ['TF_CONFIG']}"
        ) from None
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    _check_all(devices, len(tf.config.list_logical_devices(kind)))
    reduce = strategy.reduce

    # Keras 3.15 asks it to reduce nested batches, and scalars along an axis: neither can be.
    def reduce_each(operation: Any, values: Any, axis: int | None = None) -> Any:
        return tf.nest.map_structure(lambda value: reduce(operation, value, axis=None), values)

    strategy.reduce = reduce_each
    return _TensorFlow(strategy, rank, chiefs + workers)


def _start_torch(devices: int | None) -> Devices:
    import torch
    from torch import distributed

    if "WORLD_SIZE" not in os.environ:
        if devices is not None and devices > 1:
            raise ValueError(
                "on torch every device has a process of its own: start them by `keras-aiayn train "
                f"--devices {devices}`, or by torchrun"
            )
        return Devices()
    _check_all(devices, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    end_with_the_launcher()
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
        atexit.register(distributed.destroy_process_group)
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    return _Torch(rank, processes) if processes > 1 else Devices()


def processes_to_start(devices: int | None) -> int:
    """How many processes this one has to start, where torch needs one for each device.

    Args:
        devices: of this machine; all by default.

    Returns:
        Their number; 0 where there is nothing to start, or this is one of them.
    """
    if keras.backend.backend() != "torch" or "WORLD_SIZE" in os.environ:
        return 0
    import torch

    accelerators = torch.cuda.device_count()
    devices = devices or accelerators or 1
    if accelerators:
        _check_available(devices, accelerators)
    return devices if devices > 1 else 0


def sum_over_replicas(gradients: list[Any]) -> list[Any]:
    """The gradients of the whole global batch, where each replica has those of its part.

    On JAX a gradient is that of the whole already. On TensorFlow, Keras's optimizer sums only when
    it updates, after clipping; `summed_before_clipping` is the other half of doing it here. On
    torch no one else does.

    Args:
        gradients: of this replica.

    Returns:
        As many arrays.
    """
    backend = keras.backend.backend()
    if backend == "torch":
        from torch import distributed

        several = distributed.is_initialized() and distributed.get_world_size() > 1
        return _summed_by_torch(gradients) if several else gradients
    if backend == "jax":
        return gradients
    import tensorflow as tf

    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return gradients
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)


def _summed_by_torch(tensors: Sequence[Any]) -> list[Any]:
    """Sums over the processes, all tensors in one message."""
    import torch
    from torch import distributed

    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def summed_before_clipping(optimizer: keras.Optimizer) -> None:
    """Keeps the optimizer from summing over replicas what is summed already."""
    if hasattr(optimizer, "_all_reduce_sum_gradients"):  # TensorFlow's
        optimizer._all_reduce_sum_gradients = list
