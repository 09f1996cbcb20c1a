-- Leases that lie with the carrier: their jobs are ready, and on no line.
--
--   B:carried  hash    id → token, leased     B:x:LINE   zset  seq8·id by rank, like the line itself
-- A queue's row and its limits count these jobs as running. The counter `carried` of the row has their number.

do

Carrier.OUTCOME = 7 -- the outcome of a verdict that hands a lease to the carrier

local IS_READY, IS_RUNNING = '\2', '\3' -- the state in a record

local function add(id, line, rank, seq8, token, leased)
  local new, args = Carrier.new, Carrier.lines[line] or {}
  new[#new + 1] = id
  new[#new + 1] = pack('>I8I8', token, leased)
  args[#args + 1] = rank_text(rank)
  args[#args + 1] = seq8 .. id
  Carrier.lines[line] = args
  count(sub(line, 2), 'carried', 1)
end

-- Write the leases that were handed over.
function Carrier.flush()
  if #Carrier.new == 0 then return end
  call_all('HSET', B .. ':carried', Carrier.new)
  for line, args in pairs(Carrier.lines) do call_all('ZADD', B .. ':x:' .. line, args) end
  Carrier.new, Carrier.lines = {}, {}
end

-- -- handing over ----------------------------------------------------------------------------------

-- Hand the lease of a plain task over: the hot path. The task has no times, attempts or limits, so its record only
-- loses the lease. False when the job needs `carry`.
function Carrier.carry_plainly(id, data, owner, token)
  local bits = byte(data, 10)
  if byte(data, 9) ~= RUNNING or bits ~= 0 and bits ~= LINKED then return false end
  local _, _, _, _, losses, _, _, rank, queue, _, at = unpk('>I8BBI4I4I4I4I4Bc0Bc0', data)
  if row_of(queue).limiter then return false end
  local mine, leased, deadline, whose = unpk('>I8I8I8I2c0', data, at)
  if mine ~= token or whose ~= owner or deadline > 0 then return false end
  jobs[id] = sub(data, 1, 8) .. IS_READY .. sub(data, 10, at - 1)
  touch_id(id)
  drop_token(owner, token)
  add(id, (losses > 0 and 'L' or 'T') .. queue, rank, sub(data, 1, 8), token, leased)
  return true
end

-- Hand the lease of a running job over. False when the lease must be given back instead.
function Carrier.carry(j)
  if flagged(j.flags, CANCELLING) or j.expires > 0 and j.expires <= now then return false end
  drop_token(j.owner, j.token)
  if j.deadline > 0 then call('ZREM', K_DUE, 'l' .. j.id) end
  add(j.id, line_of(j), j.rank, pack('>I8', j.seq), j.token, j.leased)
  local row = row_of(j.queue)
  if row.limiter then QueueLimits.hold(row, j.leased) end
  if j.partition then Partitions.hold(j, j.leased) end
  j.state, j.token, j.deadline = READY, 0, 0
  save(j)
  return true
end

-- Make a verdict give its lease back.
function Carrier.decline(v) v.outcome, v.started, v.error = 3, 0, NOT_STARTED end

-- -- taking ----------------------------------------------------------------------------------------

-- Start a carried job; false when the job may not run.
local function start(j, row, token, owner, consumer, moved)
  if j.expires > 0 and j.expires <= now then
    unplace(j)
    finish(j, EXPIRED, TOO_LATE)
    return false
  end
  if moved or row.paused then
    unplace(j)
    place(j, 0)
    return false
  end
  if row.limiter then QueueLimits.let_go(row, true) end
  if j.partition then Partitions.let_go(j, true) end
  j.state, j.token, j.leased, j.owner, j.deadline = RUNNING, token, now, owner, 0
  if consumer then
    j.deadline = now + math.floor((j.ttr > 0 and j.ttr or 60) * 1000000)
    add_due(j.deadline, 'l' .. j.id)
  end
  save(j)
  return true
end

-- Hand over first each lease to take that a relay still has. The relay has published the job, but has
-- not reported that yet.
local function hand_over(takes)
  local kinds = {}
  for _, lease in ipairs(takes) do
    local data = jobs[lease[2]]
    if data and (type(data) ~= 'string' or sub(data, 9, 9) == IS_RUNNING) then
      local j = load_job(lease[2])
      if j.state == RUNNING and j.token == lease[1] then
        kinds[j.owner] = kinds[j.owner] or call('HGET', B .. ':o:' .. j.owner, 'kind') or ''
        if kinds[j.owner] == 'relay' then Carrier.carry(j) end
      end
    end
  end
  Carrier.flush()
end

-- Give leases (token, id) of the carrier to an owner: '1' for each that the owner gets, else '0'.
function Carrier.take(takes, owner, consumer, moved)
  local ids, taken, seen, gone, members, tokens = {}, {}, {}, {}, {}, {}
  for i, lease in ipairs(takes) do ids[i] = lease[2] end
  read_ahead(ids)
  if not moved then hand_over(takes) end
  for i, value in ipairs(fetch_all(B .. ':carried', ids)) do
    local token, id = takes[i][1], ids[i]
    taken[i] = '0'
    if value and not seen[id] and number_in(value) == token then
      seen[id] = true
      local data, line, seq8, runs = jobs[id], nil, nil, true
      local bits = type(data) == 'string' and byte(data, 10)
      local _, queue, losses
      if bits then _, _, _, _, losses, _, _, _, queue = unpk('>I8BBI4I4I4I4I4Bc0', data) else queue = data.queue end
      local row = row_of(queue)
      if (bits == 0 or bits == LINKED) and not (consumer or moved or row.paused or row.limiter) then -- the hot path
        line, seq8 = (losses > 0 and 'L' or 'T') .. queue, sub(data, 1, 8)
        jobs[id] = seq8 .. IS_RUNNING .. sub(data, 10) .. pack('>I8I8I8I2c0', token, now, 0, #owner, owner)
        touch_id(id)
      else
        local j = load_job(id)
        line, seq8 = line_of(j), pack('>I8', j.seq)
        runs = start(j, row, token, owner, consumer, moved)
      end
      if runs then
        taken[i] = '1'
        gone[#gone + 1] = id
        members[line] = members[line] or {}
        table.insert(members[line], seq8 .. id)
        tokens[#tokens + 1] = text_of(token)
        tokens[#tokens + 1] = id
        count(queue, 'carried', -1)
      end
    end
  end
  call_all('HDEL', B .. ':carried', gone)
  for line, those in pairs(members) do call_all('ZREM', B .. ':x:' .. line, those) end
  call_all('HSET', B .. ':l:' .. owner, tokens)
  return table.concat(taken)
end

-- -- taking back -----------------------------------------------------------------------------------

-- Take a job from the carrier, as if it had never been leased; false when the carrier does not have it.
function Carrier.leave(j)
  Carrier.flush()
  local value = call('HGET', B .. ':carried', j.id)
  if not value then return false end
  call('HDEL', B .. ':carried', j.id)
  call('ZREM', B .. ':x:' .. line_of(j), pack('>I8', j.seq) .. j.id)
  count(j.queue, 'carried', -1)
  count(j.queue, 'running', -1)
  local row = row_of(j.queue)
  if row.limiter then QueueLimits.let_go(row, false) end
  if j.partition then Partitions.let_go(j, false) end
  return true
end

-- Take up to `most` jobs back from the carrier. Return their number.
function Carrier.recall(most)
  local ids = call('HRANDFIELD', B .. ':carried', most)
  read_ahead(ids)
  for _, id in ipairs(ids) do
    local j = load_job(id)
    unplace(j)
    place(j, 0)
  end
  return #ids
end

end
