#!/bin/bash
# Run the files of launch/ on clusters that exist on this machine only, in network namespaces, and compare losses.
#
#     sudo benchmarks/clusters.sh [namespaces] [slurm] [ray] [kubeflow]      without a name: namespaces and slurm
#
# Needs root on Linux. `slurm` needs Debian's slurmctld, slurmd, slurm-client and munge, `ray` a Python with ray.
# Each part takes some minutes, cleans up what it made, and ends with 1 if something differs. PYTHON names
# another Python than .venv/bin/python.
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- namespaces slurm
failed=0
for part in "$@"; do
    echo "== $part"
    bash "benchmarks/clusters/$part.sh" || failed=1
done
exit "$failed"
