# Sourced by build.sh and ../build_wheels.sh: podman, kept apart from whatever else this machine does with podman.
# Needs root, but no daemon, no registry, no cgroup delegation and no network namespace.
#
#   default_ulimits = []   podman's own raise RLIMIT_NOFILE, which needs CAP_SYS_RESOURCE; a guest may lack it
#   runtime = runc         crun refuses a hybrid cgroup hierarchy
#   netns = host           the container resolves and reaches exactly what the host does
PREQUAL_PODMAN=${PREQUAL_PODMAN:-$PWD/.cache/podman}
mkdir -p "$PREQUAL_PODMAN"
export CONTAINERS_CONF=$PREQUAL_PODMAN/containers.conf CONTAINERS_STORAGE_CONF=$PREQUAL_PODMAN/storage.conf
cat > "$CONTAINERS_CONF" << EOF
[containers]
default_ulimits = []
netns = "host"

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
EOF
cat > "$CONTAINERS_STORAGE_CONF" << EOF
[storage]
driver = "overlay"
graphroot = "$PREQUAL_PODMAN/graph"
runroot = "$PREQUAL_PODMAN/run"
EOF
