-- Acting on jobs by their ids, and on queues.
--
-- ARGV  5 verb
--       cancel   6 'cancel' or 'terminate', then ids     kick, delete   6 '', then ids
--       queue    6 queue, 7 paused: '', '0', '1', 8 max_size: '' or a number
--       purge    6 queue, 7 how many at most
--       recall   6 how many at most
-- Returns '0' and '1' for each id, or how many were purged or called back, and whether `tick` is to go on with what that
--       ended; {'moved', where}.

local again = said_before() or departure()
if again then return again end

local function cancel(j)
  if j.state >= SUCCEEDED then return false end
  if j.state == RUNNING then
    if not flagged(j.flags, CANCELLING) then j.flags = j.flags + CANCELLING end
    if not flagged(j.flags, NOTED) then j.flags = j.flags + NOTED end
    save(j)
    log(j.id, ARGV[6] == 'terminate' and 'cancel was asked for, at once' or 'cancel was asked for', now / 1000000)
    call('RPUSH', B .. ':c:' .. j.owner, pack('>I8', j.token) .. ARGV[6])
    hint_owner(j.owner)
  else
    unplace(j)
    finish(j, CANCELLED, NOT_STARTED)
  end
  return true
end

local function delete(j)
  if j.state >= SUCCEEDED then
    if j.key ~= '' then Keys.forget(j) end
    unfinish(j)
  else
    if j.state == RUNNING then end_lease(j) else unplace(j) end
    leave(j, WAITING)
  end
  forget(j)
  return true
end

-- Change a queue's settings, and wake whoever they kept waiting.
local function set_queue(queue, paused, max_size)
  local row = row_of(queue)
  if paused ~= '' then row.paused = paused == '1' end
  if max_size ~= '' then row.max_size = tonumber(max_size) end
  call('HSET', row.key, 'paused', row.paused and '1' or '0', 'max_size', row.max_size)
  for _, kind in ipairs(KINDS) do
    local line = kind .. queue
    if row.paused then
      call('ZREM', K_LINES, line)
    elseif call('EXISTS', B .. ':r:' .. line) == 1 then
      call('ZADD', K_LINES, 0, line)
      rings[line] = call('ZCARD', B .. ':r:' .. line)
    end
  end
  shrunk[queue] = true
end

-- Scheduled jobs of a queue, found among all that is due, and waiting ones, among all keys.
local function unready(queue, ids, most)
  local function add(id)
    local j = #ids < most and load_job(id)
    local waits = j and (j.state == SCHEDULED or j.state == WAITING and not flagged(j.flags, LINKED))
    if waits and j.queue == queue then ids[#ids + 1] = id end
  end
  for _, member in ipairs(call('ZRANGE', K_DUE, 0, -1)) do
    if sub(member, 1, 1) == 'j' then add(sub(member, 2)) end
  end
  for _, data in ipairs(call('HVALS', K_KEY)) do
    local successor = Keys.parse(data).successor
    if successor then add(successor) end
  end
end

-- Ready jobs of a line that are in lanes; some stand in the line itself and are there already.
local function parked(line, ids, most)
  local there = {}
  for _, id in ipairs(ids) do there[id] = true end
  for _, lane in ipairs(call('SMEMBERS', B .. ':parked:' .. line)) do
    for _, member in ipairs(call('ZRANGE', Lanes.park_of(line, lane), 0, most - 1)) do
      local id = sub(member, 9)
      if #ids < most and not there[id] then ids[#ids + 1] = id end
    end
  end
end

local function purge(queue, most)
  local row = find_row(queue)
  if not row then return 0 end
  -- Those behind others first: what is purged is not cancelled for what is purged before it.
  local ids = call('ZRANGE', B .. ':held:' .. queue, 0, most - 1)
  local held = #ids
  for _, kind in ipairs(KINDS) do
    if #ids < most then
      for _, member in ipairs(call('ZRANGE', B .. ':r:' .. kind .. queue, 0, most - #ids - 1)) do
        ids[#ids + 1] = sub(member, 9)
      end
    end
  end
  for _, kind in ipairs(KINDS) do
    if #ids < most then parked(kind .. queue, ids, most) end
    if #ids < most then
      for _, member in ipairs(call('ZRANGE', B .. ':x:' .. kind .. queue, 0, most - #ids - 1)) do
        ids[#ids + 1] = sub(member, 9)
      end
    end
  end
  local rest = call('HMGET', row.key, 'scheduled', 'waiting')
  if #ids < most and (tonumber(rest[1]) or 0) + (tonumber(rest[2]) or 0) > held then unready(queue, ids, most) end
  read_ahead(ids)
  for _, id in ipairs(ids) do delete(load_job(id)) end
  return #ids
end

local verb, answer = ARGV[5], 0
if verb == 'queue' then
  set_queue(ARGV[6], ARGV[7], ARGV[8])
elseif verb == 'purge' then
  answer = purge(ARGV[6], tonumber(ARGV[7]))
elseif verb == 'recall' then
  answer = Carrier.recall(tonumber(ARGV[6]))
else
  local act, done = ({cancel = cancel, kick = kick, delete = delete})[verb], {}
  for i = 7, #ARGV do
    local j = load_job(ARGV[i])
    done[#done + 1] = j and act(j) and '1' or '0'
    flow() -- what ends for that is not there any more to be acted upon
  end
  answer = table.concat(done)
end
finish_step()
return say({answer, flows_on() and 1 or 0})
