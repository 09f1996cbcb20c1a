-- The end of a lease: settled, given back, timed out or lost.

local Outcome = {SUCCESS = 0, RETRY = 1, FAIL = 2, RELEASE = 3, SNOOZE = 4, CANCELLED = 5, EXPIRED = 6}

-- Settle the success of a plain task, with neither times nor key nor attempts: the hot path. The new record is made
-- from the bytes of the old one, without a table in between. False when the job needs `close_attempt`.
local function succeed_plainly(id, data, owner, worker, v)
  local bits = byte(data, 10)
  if v.outcome ~= Outcome.SUCCESS or v.followers > 0 or byte(data, 9) ~= RUNNING then return false end
  if bits ~= 0 and bits ~= LINKED and bits ~= LIMITED then return false end
  local n, _, _, attempt, losses, limit, policy, rank, queue, key, at = unpk('>I8BBI4I4I4I4I4Bc0Bc0', data)
  local partition, cost, from = nil, 0, at
  if bits == LIMITED then partition, cost, at = unpk('>I2c0d', data, at) end
  local token, leased, deadline, whose = unpk('>I8I8I8I2c0', data, at)
  if token ~= v.token or whose ~= owner or key ~= '' or deadline > 0 then return false end
  local class, flags = 0, TAIL + bits
  if v.result ~= '' then
    class, flags, results[id] = 1, flags + RESULT, v.result
  end
  if bits == LINKED then
    class = 3
    add_end(id, SUCCEEDED)
  end
  local prune = now + keep_class(class)
  local size = 39 + #worker + #v.error + #v.traceback -- of the attempt
  jobs[id] = pack('>I8BBI4I4I4I4I4Bc0Bc0I8I8I4BI4I4' .. sub(Backoff.ATTEMPT, 2), n, SUCCEEDED, flags, attempt + 1, losses,
    limit, policy, rank, #queue, queue, 0, partition and sub(data, from, at - 1) or '', now, prune, 0, 1, size + 4, size,
    attempt + 1, leased / 1000000, v.started, v.ended, Outcome.SUCCESS, #worker, worker, #v.error, v.error,
    #v.traceback, v.traceback)
  if partition then Partitions.ended(partition) end
  touch_id(id)
  drop_token(owner, token)
  prune_later(class, prune, id)
  finished[#finished + 1] = id
  local row = row_of(queue)
  row.by.running, row.by.succeeded = (row.by.running or 0) - 1, (row.by.succeeded or 0) + 1
  if row.max_size > 0 then shrunk[queue] = true end
  if row.limiter then QueueLimits.ended(row, true, false) end
  return true
end

-- The number, the lease time and the run of the latest attempt in a trail.
function Backoff.latest(j)
  if j.trail == 0 then return nil end
  local at = 1
  for _ = 2, j.trail do at = at + 4 + unpk('>I4', j.attempts, at) end
  local number, leased, _, _, _, _, _, _, behind = unpk(Backoff.ATTEMPT, j.attempts, at + 4)
  return number, leased, behind <= #j.attempts and unpk('>I4', j.attempts, behind) or 1
end

-- True when the run of this lease is in the trail already: the lease was held after the run.
function Limits.was_held(j)
  local _, leased = Backoff.latest(j)
  return leased == j.leased / 1000000
end

local close_attempt
do

local END = {[Outcome.FAIL] = FAILED, [Outcome.CANCELLED] = CANCELLED, [Outcome.EXPIRED] = EXPIRED}
local KEEP_ATTEMPTS = 20

-- Add an attempt to the trail; drop the oldest if the trail is full.
local function add_attempt(j, worker, v)
  local last, _, run = Backoff.latest(j)
  if last and j.attempt <= last then run = run + 1 end
  local attempt = pack(Backoff.ATTEMPT, j.attempt, j.leased / 1000000, v.started, v.ended, v.outcome,
    #worker, worker, #v.error, v.error, #v.traceback, v.traceback)
  if run and run > 1 then attempt = attempt .. pack('>I4', run) end
  if j.trail == KEEP_ATTEMPTS then
    j.attempts = sub(j.attempts, 5 + unpk('>I4', j.attempts))
    j.trail = j.trail - 1
  end
  j.attempts = j.attempts .. pack('>I4', #attempt) .. attempt
  j.trail = j.trail + 1
end

-- Close the lease of a running job: count the attempt, and place the job or end it.
function close_attempt(j, worker, v)
  local outcome, row = v.outcome, row_of(j.queue)
  local uncounted = outcome == Outcome.RELEASE or outcome == Outcome.SNOOZE
  local back = uncounted and v.started == 0 and not Limits.was_held(j)
  if row.limiter then
    local well = nil
    if outcome == Outcome.SUCCESS then well = true elseif outcome == Outcome.RETRY or outcome == Outcome.FAIL then well = false end
    QueueLimits.ended(row, well, back and j.leased)
  end
  if j.partition and back then Partitions.give_back(j) end
  if v.rank and v.rank >= 0 then j.rank = v.rank end
  if not uncounted then
    j.attempt = j.attempt + 1
    add_attempt(j, worker, v)
    if outcome == Outcome.RETRY and j.limit > 0 and j.attempt >= j.limit then outcome = Outcome.FAIL end
  end
  if outcome == Outcome.RETRY and v.hold and not flagged(j.flags, CANCELLING) and not (j.expires > 0 and j.expires <= now) then
    count(j.queue, 'retried', 1)
    save(j) -- the lease stays until the old run is dead
    return
  end
  end_lease(j)
  if outcome == Outcome.SUCCESS then
    if v.result ~= '' then set_result(j, v.result) end
    finish(j, SUCCEEDED, '')
  elseif END[outcome] then
    finish(j, END[outcome], v.error)
  elseif flagged(j.flags, CANCELLING) then
    local said = outcome == Outcome.RELEASE and v.error or ''
    finish(j, CANCELLED, said ~= '' and said or 'cancelled while it was running')
  elseif j.expires > 0 and j.expires <= now then
    finish(j, EXPIRED, TOO_LATE)
  else
    local delay = v.delay
    if outcome == Outcome.RETRY then
      count(j.queue, 'retried', 1)
      if delay < 0 or (delay == 0 and flagged(j.flags, MESSAGE)) then delay = Backoff.after(j) end
    end
    j.error = outcome == Outcome.SNOOZE and v.error or '' -- the reason for the wait, for inspection
    place(j, delay > 0 and now + math.floor(delay * 1000000) or 0)
  end
end

end
