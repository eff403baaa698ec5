"""Names of backends, defaults for Azure ML, keys and defaults of the log's configuration.

Mirrors deepspeed.comm.constants: same names.
"""

NCCL_BACKEND = "nccl"
CCL_BACKEND = "ccl"
MPI_BACKEND = "mpi"
GLOO_BACKEND = "gloo"
SCCL_BACKEND = "sccl"
HCCL_BACKEND = "hccl"
DSCOMM_BACKEND = "dscomm"  # not in deepspeed.comm

DEFAULT_AML_MASTER_PORT = "54965"
DEFAULT_AML_NCCL_SOCKET_IFNAME = "^docker0,lo"

COMMS_LOGGER_FORMAT = """
The communication log is configured by:
"comms_logger": {
  "enabled": true,
  "verbose": false,
  "prof_all": true,
  "debug": false,
  "prof_ops": ["all_reduce", "custom_all_reduce_name"],
  "trace_events": 0
}
"""
COMMS_LOGGER = "comms_logger"

COMMS_LOGGER_ENABLED = "enabled"
COMMS_LOGGER_ENABLED_DEFAULT = False
COMMS_LOGGER_VERBOSE = "verbose"
COMMS_LOGGER_VERBOSE_DEFAULT = False
COMMS_LOGGER_PROF_ALL = "prof_all"
COMMS_LOGGER_PROF_ALL_DEFAULT = True
COMMS_LOGGER_DEBUG = "debug"
COMMS_LOGGER_DEBUG_DEFAULT = False
COMMS_LOGGER_PROF_OPS = "prof_ops"
COMMS_LOGGER_PROF_OPS_DEFAULT: list[str] = []
# Not in deepspeed.comm.
COMMS_LOGGER_TRACE_EVENTS = "trace_events"
COMMS_LOGGER_TRACE_EVENTS_DEFAULT = 0
