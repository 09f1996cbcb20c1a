"""The job server: any broker over HTTP, for other machines and other languages.

    run         one process: sockets, signals, a graceful end, workers beside it
    settings    how it is to be, as its command line says
    app         the ASGI application: what lies under which path
    edge        what holds for every request: ids, access, sizes, times, the access log (logs)
    access      who may come in; tokens: what with, with which role
    connection  what holds for every connection before there is a request
    problems    errors in the one form they all have (RFC 9457); sentences: of bad inputs
    endpoints   how a part of the JSON API is declared, found and answered
    openapi     the description made of those declarations; pages: the same for people
    shapes      what requests and answers look like
    api/        the JSON API under /v1
    backend     what all of that acts on: the app, the desk
    desk, asks  many clients take and settle jobs as one owner, in shared commits

Many clients share commits: what they put goes through ``Tidemill.gathered``, what they take and
settle through the desk. Nothing here knows a broker, and nothing is written twice that the app, its
queues, limits and schedules can do.
"""
