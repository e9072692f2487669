"""Beyond synchronous SGD: averaging, federated learning, parameter servers, backup workers, model parallelism.

Importing this starts no MPI and imports no torch, so that who meets whom, and who is late, can be worked out without.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hpcdl.sgd.clients import asked, deal, dropped
from hpcdl.sgd.order import Asynchronous, Backup
from hpcdl.sgd.pace import Pace
from hpcdl.sgd.pairs import matching

if TYPE_CHECKING:
    from hpcdl.sgd.backup import backup_workers
    from hpcdl.sgd.downpour import parameter_server
    from hpcdl.sgd.elastic import ElasticAveraging
    from hpcdl.sgd.federated import FederatedAveraging, Round
    from hpcdl.sgd.gossip import Gossip
    from hpcdl.sgd.local import LocalSGD
    from hpcdl.sgd.pipeline import Pipeline, cut, layers, mesh_of, split
    from hpcdl.sgd.remedies import DelayCompensation, staleness_aware
    from hpcdl.sgd.server import Passed, Report
    from hpcdl.sgd.stream import Stream

__all__ = [
    "Asynchronous",
    "Backup",
    "DelayCompensation",
    "ElasticAveraging",
    "FederatedAveraging",
    "Gossip",
    "LocalSGD",
    "Pace",
    "Passed",
    "Pipeline",
    "Report",
    "Round",
    "Stream",
    "asked",
    "backup_workers",
    "cut",
    "deal",
    "dropped",
    "layers",
    "matching",
    "mesh_of",
    "parameter_server",
    "split",
    "staleness_aware",
]

_ABOUT_TORCH = {
    "backup": ("backup_workers",),
    "downpour": ("parameter_server",),
    "elastic": ("ElasticAveraging",),
    "federated": ("FederatedAveraging", "Round"),
    "gossip": ("Gossip",),
    "local": ("LocalSGD",),
    "pipeline": ("Pipeline", "cut", "layers", "mesh_of", "split"),
    "remedies": ("DelayCompensation", "staleness_aware"),
    "server": ("Passed", "Report"),
    "stream": ("Stream",),
}
"""What each module is asked for."""


def __getattr__(name: str) -> object:
    for module, names in _ABOUT_TORCH.items():
        if name in names:
            return getattr(import_module(f"hpcdl.sgd.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
