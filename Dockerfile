# One image for every command of tidemill: `docker run IMAGE worker …`, `docker run IMAGE server …`.

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do pip install --no-cache-dir "$wheel[all]"; done

# The mount points belong to the user, so new volumes do, too.
RUN useradd --uid 10001 --create-home tidemill && install -d -o tidemill -g tidemill /app /data /auth
USER 10001:10001
WORKDIR /app
ENV PYTHONUNBUFFERED=1 TIDEMILL_URL=lmdb:///data/store

# TERM lets a worker finish its running jobs. The exec form makes tidemill process 1, which gets the signal.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tidemill"]
CMD ["--help"]

# No HEALTHCHECK here: the right one differs by command. compose.yaml has the server's.
