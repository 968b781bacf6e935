# shellcheck shell=bash
# For batch scripts: run a job's command, and put the job back into the queue if its time ran out.
#
#     run_and_requeue "REQUEUE COMMAND" mpirun python -m training ...
#
# The batch system sends SIGUSR1 to the script ahead of the time limit.  The command gets it, too; srun and mpirun pass it on
# to the ranks, and the training ends with a checkpoint and status 0.  Then the job is requeued.  A command that fails ends the
# job, but one with --checkpoint_dir is started again from its newest checkpoint, by training.supervise, whose flags are in SUPERVISE.
run_and_requeue() {
    local requeue supervise child status signals=0 seen=-1
    read -ra requeue <<<"$1"
    shift
    if [[ " $*" =~ " --checkpoint"[_-]"dir" ]]; then
        read -ra supervise <<<"python -m training.supervise ${SUPERVISE:-} --"
        set -- "${supervise[@]}" "$@"
    fi
    "$@" &
    child=$!
    trap 'signals=$((signals + 1)); kill -USR1 "$child" 2>/dev/null || true' USR1
    while [ "$seen" != "$signals" ]; do # a signal ends `wait` before the command has ended
        seen=$signals status=0
        wait "$child" || status=$?
    done
    trap - USR1
    if [ "$signals" -gt 0 ] && [ "$status" -eq 0 ]; then
        echo "The time limit is near: requeueing the job, which resumes from its checkpoint."
        "${requeue[@]}"
    fi
    return "$status"
}
