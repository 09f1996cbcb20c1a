"""The job server: any broker over HTTP and beanstalkd's protocol, for other machines and languages.

    run              the server process: sockets, signals, shutdown; a worker that the server runs
    settings         the settings of its command line
    tokens           the file of API tokens, with their roles
    shared_owner     one owner of the store through which many clients reserve and settle jobs
    dispatcher       the shared owner's thread, with waiters and pending_verdicts
    delivery         delivers messages to a client; with ttr 0 at most once
    http/            the JSON API: request_pipeline, endpoints, api/, schemas/, broker_rpc
    beanstalk/       the port for beanstalkd's protocol

Many clients share commits. Puts go through the app's put batching; a shared owner reserves and
settles jobs for all clients. The server has no code for a particular broker. It calls the app for
queues, limits and schedules.
"""
