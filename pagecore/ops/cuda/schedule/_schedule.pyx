"""Schedules of attention on a device: plans made there, and the order of their items."""

include "device_plan.pxi"
include "schedule.pxi"
