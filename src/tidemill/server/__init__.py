"""The job server: any broker over HTTP and beanstalkd's protocol, for other machines and languages.

    run              the server process: sockets, signals, shutdown
    settings         the settings of its command line
    tokens           the file of API tokens, with their roles
    embedded_worker  a worker that the server runs
    shared_owner     one owner of the store through which many clients reserve and settle jobs
    dispatcher       its thread, with waiters and pending_verdicts
    delivery         messages on their way to a client, at most once with ttr 0
    deadlines        the ends of waits, rounded so that many end at once
    http/            requests: request_pipeline (the steps), endpoints, api/, schemas/, broker_rpc
    beanstalk/       the port for beanstalkd's protocol

Many clients share commits: puts go through the app's put batching, and everything that is reserved
and settled goes through a shared owner. The server knows no broker, and repeats nothing that the
app, its queues, limits and schedules can do.
"""
