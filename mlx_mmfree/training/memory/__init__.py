"""The memory that a run will take."""

from .plan import MemoryPlan as MemoryPlan
from .plan import plan_memory as plan_memory
