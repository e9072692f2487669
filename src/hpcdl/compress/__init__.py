"""Gradient compression: less on the wire, and nothing lost for ever."""

from hpcdl.compress.catalogue import METHODS, make
from hpcdl.compress.dgc import DGC
from hpcdl.compress.half import Half
from hpcdl.compress.hook import Compression
from hpcdl.compress.method import Memory, Method, Piece
from hpcdl.compress.powersgd import PowerSGD
from hpcdl.compress.quantise import QSGD, OneBit, SignSGD, TernGrad
from hpcdl.compress.sparse import RandomK, TopK
from hpcdl.compress.wire import Wire

__all__ = [
    "DGC",
    "METHODS",
    "QSGD",
    "Compression",
    "Half",
    "Memory",
    "Method",
    "OneBit",
    "Piece",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "TopK",
    "Wire",
    "make",
]
