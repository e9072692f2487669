# Sourced by the jobs in this folder. It finds the MPI that mpi4py loads and the launch line that works with it, or ends
# the job with a line that says what is missing:  "${launch[@]}" "$PYTHON" -m hpcdl train

# Edit here: what brings Python and MPI. Either your cluster's modules, or an environment that holds an MPI's wheel.
# module purge && module load python openmpi
PYTHON=${PYTHON:-python3}          # or: PYTHON=~/hpcdl/.venv/bin/python sbatch train.sbatch
LAUNCH=${LAUNCH:-}                 # what starts the ranks, if you know better: LAUNCH="srun --mpi=pmix"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)   # the folder of the jobs

fail() {
    echo "env.sh: $*" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null ||
    fail "no $PYTHON here: load its module in env.sh, or name one: PYTHON=~/hpcdl/.venv/bin/python sbatch ..."
found=$("$PYTHON" -c '
import sys, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import hpcdl
print(MPI.get_vendor()[0], sys.prefix, sep="\n")') ||
    fail "$PYTHON cannot use hpcdl or mpi4py's MPI (see above): install hpcdl there, and load the MPI's module in env.sh"
{ read -r mpi; read -r prefix; } <<<"$found"

# A wheel's mpiexec lies beside its python, a module's on the path.
mpiexec=$(PATH=$prefix/bin:$PATH command -v mpiexec)
need_mpiexec() {
    [ "$mpiexec" ] || fail "mpi4py loads $mpi, but there is no mpiexec: load the module of that MPI in env.sh"
    case "$1:$("$mpiexec" --version 2>&1)" in
        open:*"Open MPI"* | open:*OpenRTE*) ;;
        open:*) fail "mpi4py loads $mpi, but $mpiexec belongs to another MPI: load the one that mpi4py was built with" ;;
        other:*"Open MPI"* | other:*OpenRTE*)
            fail "mpi4py loads $mpi, but $mpiexec is Open MPI's: load the MPI that mpi4py was built with" ;;
    esac
}
has_pmi2() { srun --mpi=list 2>&1 | grep -qw pmi2; }

ranks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1}))}   # an older SLURM may leave it out
srun=(srun --mpi=pmi2 --kill-on-bad-exit=1)
# Hydra starts one srun a node, which would complain of that variable.
hydra=(env -u SLURM_NTASKS_PER_NODE "$mpiexec" -n "$ranks")
if [ "$LAUNCH" ]; then
    read -ra launch <<<"$LAUNCH"
    command -v "${launch[0]}" >/dev/null || fail "LAUNCH=\"$LAUNCH\": there is no ${launch[0]}"
else
    case $mpi in
        "Open MPI")
            # Under srun --mpi=pmi2 every rank would be alone in a world of its own, and nothing would say so.
            need_mpiexec open
            # Unless told, it binds a rank of many threads to one core.
            launch=("$mpiexec" -n "$ranks" --bind-to none)
            if [ "$(id -u)" = 0 ]; then  # in a container; it asks twice
                export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            fi ;;
        "Intel MPI")
            # Its srun wants SLURM's own library, such as I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so
            if [ -e "${I_MPI_PMI_LIBRARY:-}" ] && has_pmi2; then
                launch=("${srun[@]}")
            else
                need_mpiexec other
                unset I_MPI_PMI_LIBRARY
                launch=("${hydra[@]}")
            fi ;;
        *MPICH* | MVAPICH*)
            if has_pmi2; then
                launch=("${srun[@]}")
            else
                need_mpiexec other
                launch=("${hydra[@]}")
            fi ;;
        *) fail "how $mpi is started here is not known: say it, as in LAUNCH=\"srun --mpi=pmix\" sbatch ..." ;;
    esac
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# srun does not take it over from sbatch.
if [ "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

echo "$SLURM_JOB_NAME, job $SLURM_JOB_ID: $ranks ranks on $SLURM_JOB_NODELIST, $mpi, ${launch[*]}"
