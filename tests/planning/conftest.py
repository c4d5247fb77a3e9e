"""A plan that several files of tests ask for."""

from __future__ import annotations

import pytest

from dtmega import config
from dtmega.planning.answers import job
from dtmega.planning.plan import Plan, plan_job
from tests.planning.small import KEYS


@pytest.fixture(scope="package")
def small_plan() -> Plan:
    """The plan of two ranks on pretended GPUs."""
    laid_out = job.lay_out(config.load(KEYS), 2, job.machine_of("cuda"))
    return plan_job(laid_out.cfg, laid_out.sizes, laid_out.machine.device)
