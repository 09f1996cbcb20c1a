-- Lease jobs to an owner from one line (the ready set of a queue).

local take_line

do

local Claims = Partitions.Claims

-- Lease a job without times or attempts: its record only grows, and no table is made of it. Lua reads each new string
-- twice and collects it later, so the record is made in one piece.
local function lease_plainly(x, id, data, token, envelope, turn)
  local number, _, flags, attempt, losses, limit, policy, rank, at = unpk('>I8BBI4I4I4I4I4', data)
  jobs[id] = pack('>I8BBI4I4I4I4I4c0I8I8I8I2c0', number, RUNNING, flags, attempt, losses, limit, policy, rank,
    sub(data, at), token, now, 0, #x.owner, x.owner)
  touch_id(id)
  local leases = x.leases
  leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, attempt + 1, losses, rank, turn, 0, now, 0)
  leases[#leases + 1] = envelope
end

local function add_token(tokens, token, id)
  tokens[#tokens + 1] = text_of(token)
  tokens[#tokens + 1] = id
end

-- Lease a job that was taken from its line. An expired job ends instead, and the answer is false. The
-- job's partition is updated here, unless a partition claim does that.
local function lease_job(x, j, token, envelope, tokens, by_claim)
  if j.partition and not by_claim then Partitions.taken(j) end
  if j.expires > 0 and j.expires <= now then
    finish(j, EXPIRED, TOO_LATE)
    return false
  end
  local ttr = x.consumer and (j.ttr > 0 and j.ttr or 60) or 0
  j.state, j.token, j.leased, j.owner, j.deadline = RUNNING, token, now, x.owner, 0
  if x.consumer then
    j.deadline = now + math.floor(ttr * 1000000)
    add_due(j.deadline, 'l' .. j.id)
  end
  add_token(tokens, token, j.id)
  save(j)
  show_lease(x, j, token, ttr, envelope)
  if j.partition and not by_claim then Partitions.start(j, token) end
  if flagged(j.flags, LINKED) then show_inputs(x, j.id) end
  return true
end

-- Draw numbers above all tokens that the owner ever had. A server that lost its last writes would draw old tokens
-- again, and a late verdict would then match a new lease.
local function draw_tokens(x, many)
  local token = call('INCRBY', B .. ':seq', many) - many
  if token < x.highest_token then
    call('INCRBY', B .. ':seq', x.highest_token - token)
    token = x.highest_token
  end
  if x.first_token == 0 then x.first_token = token + 1 end
  x.last_token = token + many
  return token
end

-- Write the leases of a line.
local function add_leases(x, line, tokens)
  count(sub(line, 2), 'running', #tokens / 2)
  call_all('HSET', x.leases_key, tokens)
end

local function unlist(line)
  call('ZREM', K_LINES, line)
  row_of(sub(line, 2)).listed = nil
end

-- -- lines with partitions -------------------------------------------------------------------------

-- Take the first job of a line by itself; true when it is leased, nil when the line is empty.
local function take_one(x, line, token, tokens)
  local member = call('ZPOPMIN', B .. ':r:' .. line, 1)[1]
  if not member then return nil end
  local j = load_job(sub(member, 9))
  j.turn = number_in(member) -- the job's number in the line
  local leased = lease_job(x, j, token, '', tokens)
  if j.partition then Partitions.follow(j.partition) end
  flow()
  Limits.sync_partitions()
  flush_lines()
  return leased
end

local function open_run(line, many)
  local run = Claims.open(line, many)
  read_links_ahead(linked_of(run.ids))
  return run
end

-- Lease the first job of a run (see partition_claim.lua). False when this may change more than the job's
-- partition: then `take_one` leases the job.
local function take_first(x, run, head, token, tokens)
  local id, name, cost, claim = head.id, nil, 0, nil
  local data = jobs[id]
  local bits = type(data) == 'string' and byte(data, 10) or -1
  if bits == LIMITED and not x.consumer then
    name, cost = Partitions.partition_of(data)
    claim = Claims.of(run, head, name)
    if not claim then return false end
    lease_plainly(x, id, data, token, '', head.turn)
    add_token(tokens, token, id)
  else
    local j = load_job(id)
    if j.expires > 0 and j.expires <= now then return false end
    if j.partition then
      name, cost, claim = j.partition, j.cost, Claims.of(run, head, j.partition)
      if not claim then return false end
    end
    j.turn = head.turn
    lease_job(x, j, token, '', tokens, true)
  end
  Claims.take(run, head, claim, name, cost, token)
  return true
end

-- Take jobs from a line with partitions. When a job is taken, the next job of its partition may become
-- the first job of the line.
local function take_in_turn(x, line, many)
  local token, tokens, places, ids = draw_tokens(x, many), {}, {}, {}
  local size, empty, leases = many, false, x.leases
  local run = open_run(line, size)
  while many > 0 do
    local head = Claims.first(run)
    local leased = head and take_first(x, run, head, token + 1, tokens)
    local id = head and head.id
    if not leased then -- the run is used up, or this job is taken by itself
      local over = not head and run.complete
      Claims.close(run)
      run = nil
      if over then
        unlist(line)
        empty = true
        break
      end
      if head then leased = take_one(x, line, token + 1, tokens) end
      size = math.min(many, head and 8 or 2 * size)
    end
    if leased then
      token, many = token + 1, many - 1
      places[#places + 1], ids[#ids + 1] = #leases, id
    end
    run = run or many > 0 and open_run(line, size)
  end
  if run then Claims.close(run) end
  for i, envelope in ipairs(fetch_all(K_ENV, ids)) do leases[places[i]] = envelope end
  add_leases(x, line, tokens)
  return empty
end

-- -- lines without partitions ----------------------------------------------------------------------

-- Lease some jobs that were taken from a line; an expired job ends instead. Returns the number of leases.
local function lease_all(x, line, ids)
  local envelopes, consumer = fetch_all(K_ENV, ids), x.consumer
  local first, tokens = draw_tokens(x, #ids), {}
  local token = first
  for i, id in ipairs(ids) do
    local data = jobs[id]
    local bits = type(data) == 'string' and byte(data, 10)
    if (bits == 0 or bits == LINKED) and not consumer then -- the hot path
      token = token + 1
      lease_plainly(x, id, data, token, envelopes[i], number_in(data))
      add_token(tokens, token, id)
      if bits == LINKED then show_inputs(x, id) end
    elseif lease_job(x, load_job(id), token + 1, envelopes[i], tokens) then
      token = token + 1
    end
  end
  add_leases(x, line, tokens)
  return token - first
end

local function take_at_once(x, line, many)
  local key = B .. ':r:' .. line
  while many > 0 do
    local ready = call('ZPOPMIN', key, many)
    if #ready == 0 then
      unlist(line)
      return true
    end
    local ids = {}
    for i = 1, #ready, 2 do ids[#ids + 1] = sub(ready[i], 9) end
    read_ahead(ids)
    read_links_ahead(linked_of(ids))
    many = many - lease_all(x, line, ids)
    flow()
    Limits.sync_partitions()
    flush_lines() -- the end of an expired job may have made a successor ready
  end
  return false
end

-- Lease the first jobs of one line; true when the line has no more, or its limit lets no more start.
function take_line(x, line, many)
  local row, before = find_row(sub(line, 2)), #x.leases
  if row and row.limiter then
    many = QueueLimits.room(row, many)
    if many <= 0 then return true end
  end
  local in_turn = row and row.partitioned and call('EXISTS', B .. ':parked:' .. line) == 1
  local empty = (in_turn and take_in_turn or take_at_once)(x, line, many)
  if row and row.limiter and #x.leases > before then QueueLimits.take(row, (#x.leases - before) / 2) end
  return empty
end

end
