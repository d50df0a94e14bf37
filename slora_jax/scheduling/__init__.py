"""Who runs in the next step: the scheduler, the waiting queue, its policies, early abort and limits."""
