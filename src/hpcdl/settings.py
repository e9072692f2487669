"""The environment variables, all in one place. Read when the first collective is called."""

from __future__ import annotations

import os

CHECK = os.environ.get("HPCDL_CHECK", "1") != "0"
"""HPCDL_CHECK=0 drops the agreement ahead of every collective: ranks that disagree then hang, or get garbage."""
