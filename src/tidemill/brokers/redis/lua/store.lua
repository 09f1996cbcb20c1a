-- What lies where, and the moves every job is made to take: the only place a state changes.
--
-- All files together are one library of the server's (library.py); each verb is a function of it.
-- KEYS[1] is the store's hash tag, B below; all other keys begin with it and are made here, so that
-- they lie in one slot of a cluster.
--
--   B:job      hash    id → record           see pack_job
--   B:env      hash    id → envelope, which nothing here opens
--   B:result   hash    id → result of a job that has one
--   B:all      zset    id by seq             for walking through all jobs, newest first
--   B:r:LINE   zset    seq8·id by rank       what can be leased; a line is a queue behind its kind: L, M or T
--                                        (tasks that run alone since they were lost, messages, tasks)
--   B:lines    zset    LINE, all 0           lines that are not paused and may have something ready
--   B:due      zset    j·id, x·id, l·id      by time: a scheduled job, an expiry, the end of a message's lease
--   B:l:OWNER  hash    token → id            leases; the fence is the token in the record
--   B:key      hash    key → id \0 successor
--   B:fin:N    zset    id by prune time      finished: 0 without result, 1 with one (or cancelled, expired), 2 failed
--   B:q:QUEUE  hash    paused, max_size, moved, and a counter for each state but ready, and each total
--   B:queues   zset    queue, all 0
--   B:p:ID     string  progress of a job     B:g:ID  list  its log
--   B:o:OWNER  hash    record, name, kind, epoch (of its attach); serial and answer of its last step; last queue
--   B:beat     zset    owner by the time at which it is given up
--   B:c:OWNER  list    commands left for it
--   B:asleep   zset    owner by the time it sleeps to: whoever is here is not looking
--   B:z:KIND B:z:LINE  zset  sleeper by when it fell asleep; an entry whose owner is awake is old
--   B:waits    hash    id → channels of those who wait for its end, and B:space:QUEUE set, for room
--   B:said:S   string  serial and answer of a client's last call, kept 10 minutes
--   B:departure hash   mark, where, sealed: all of the store goes to another
--   B:from:MARK hash   cursor, first: how far a departed store was taken in, and where its numbers begin
--   B:seq      string  the last number drawn: jobs and tokens are numbered from the same sequence
--   B:format, B:born  string
--   channel B:w:SLEEPER  a hint
--
-- Times are microseconds of the server's clock. ARGV[1] is added to it (tests move time so), ARGV[2]
-- is retention (see keep_for), ARGV[3] and ARGV[4] are the session and serial of the call, or empty.

local WAITING, SCHEDULED, READY, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED = 0, 1, 2, 3, 4, 5, 6, 7
local COUNTER = {[0] = 'waiting', 'scheduled', nil, 'running', 'succeeded', 'failed', 'cancelled', 'expired'}
local CANCELLING, MESSAGE, NOTED, TIMED, TAIL, RESULT = 1, 2, 4, 8, 16, 32
local TOO_LATE = 'not started before it expired'
local NOT_STARTED = 'cancelled before it started'
local CHUNK = 1000 -- arguments of one command at most; Lua's stack ends at 8000


-- What belongs to one call; `begin` makes it all anew.
local call, pack, unpk, sub, byte -- which are not there yet while the library is loaded
local ARGV, now
local B, K_JOB, K_ENV, K_RESULT, K_ALL, K_DUE, K_KEY, K_LINES, K_ASLEEP, K_WAITS
-- What it has read or means to write, by id: a record, its bytes, or false when there is none. Writes
-- are collected and done by `flush`; scripts do not roll back, so nothing may fail after it.
local jobs, envs, results
local changed, change_list
local fresh -- id → seq of jobs that are new
local rows -- queue → settings, and by how much its counters change; false when there is none
local entering -- LINE → arguments of ZADD
local finishing -- class → arguments of ZADD
local ended_leases -- OWNER → tokens
local rings, finished, shrunk -- whom to wake: LINE → jobs, ids, queues
local due_moved -- somebody may have to look earlier, or in another's place
local seq -- the last number drawn for a new job
local rank_texts -- rank → as text
local retention -- class → microseconds, as far as it was asked for

local function begin_lightly(keys, args)
  call, pack, unpk, sub, byte = redis.call, struct.pack, struct.unpack, string.sub, string.byte
  ARGV = args
  if keys[1] ~= B then
    B = keys[1]
    K_JOB, K_ENV, K_RESULT, K_ALL = B .. ':job', B .. ':env', B .. ':result', B .. ':all'
    K_DUE, K_KEY = B .. ':due', B .. ':key'
    K_LINES, K_ASLEEP, K_WAITS = B .. ':lines', B .. ':asleep', B .. ':waits'
  end
end

local function begin(keys, args)
  begin_lightly(keys, args)
  local time = call('TIME')
  now = time[1] * 1000000 + time[2] + args[1]
  jobs, envs, results, changed, change_list, fresh = {}, {}, {}, {}, {}, {}
  rows, entering, finishing, ended_leases = {}, {}, {[0] = {}, {}, {}}, {}
  rings, finished, shrunk, due_moved, seq, retention, rank_texts = {}, {}, {}, false, 0, nil, {}
end

local function flagged(flags, flag) return bit.band(flags, flag) ~= 0 end

-- Numbers as text: the server would print them as doubles, which takes longer than most commands.
local function text_of(number) return string.format('%d', number) end

local function rank_text(rank)
  local text = rank_texts[rank]
  if not text then
    text = text_of(rank)
    rank_texts[rank] = text
  end
  return text
end

-- A command with any number of arguments, in pieces. CHUNK divides by 2 and by 1.
local function call_all(command, key, args)
  local count = #args
  if count <= CHUNK then
    if count > 0 then call(command, key, unpack(args)) end
    return
  end
  for from = 1, count, CHUNK do
    call(command, key, unpack(args, from, math.min(from + CHUNK - 1, count)))
  end
end

local function fetch_all(key, fields)
  local count = #fields
  if count == 0 then return {} end
  if count <= CHUNK then return call('HMGET', key, unpack(fields)) end
  local values = {}
  for from = 1, count, CHUNK do
    for _, value in ipairs(call('HMGET', key, unpack(fields, from, math.min(from + CHUNK - 1, count)))) do
      values[#values + 1] = value
    end
  end
  return values
end

-- -- what was asked before -------------------------------------------------------------------------

-- The answer to this very call, when it was done already and its reply was lost. A request may also
-- arrive late, after later ones of its session: it was repeated and answered long ago.
local function said_before()
  if ARGV[3] == '' then return nil end
  local said = call('GET', B .. ':said:' .. ARGV[3])
  if said and sub(said, 1, 8) >= ARGV[4] then return cmsgpack.unpack(sub(said, 9)) end
  return nil
end

local function say(answer)
  if ARGV[3] ~= '' then
    call('SET', B .. ':said:' .. ARGV[3], ARGV[4] .. cmsgpack.pack(answer), 'EX', 600)
  end
  return answer
end

-- Whether the store is left for another: nobody may change it any more, nor, once sealed, may time.
-- The rows of queues say `moved` too, for who reads nothing else.
local function departure()
  local where = call('HGET', B .. ':departure', 'where')
  return where and {'moved', where}
end

local function is_sealed() return call('HGET', B .. ':departure', 'sealed') == '1' end

-- -- records ---------------------------------------------------------------------------------------

-- A record is: seq, state, flags, attempt, losses, limit, policy, rank, queue, key; if TIMED, due,
-- expires, ttr, timeout, result_ttl; if running, token, leased, deadline, owner; if finished, when, and
-- when to prune; if TAIL, error and attempts. The client writes all behind the seq of a new one.
local function parse_job(id, data)
  local seq, state, flags, attempt, losses, limit, policy, rank, queue, key, at =
    unpk('>I8BBI4I4I4I4I4Bc0Bc0', data)
  local due, expires, ttr, timeout, result_ttl = 0, 0, -1, 0, -1
  if flagged(flags, TIMED) then due, expires, ttr, timeout, result_ttl, at = unpk('>I8I8ddd', data, at) end
  local token, leased, deadline, owner, finished_at, prune = 0, 0, 0, '', 0, 0
  if state == RUNNING then
    token, leased, deadline, owner, at = unpk('>I8I8I8I2c0', data, at)
  elseif state >= SUCCEEDED then
    finished_at, prune, at = unpk('>I8I8', data, at)
  end
  local why, trail, attempts = '', 0, ''
  if flagged(flags, TAIL) then why, trail, attempts = unpk('>I4c0BI4c0', data, at) end
  return { -- all at once: a table that grows field by field is made anew six times
    id = id, seq = seq, state = state, flags = flags, attempt = attempt, losses = losses, limit = limit,
    policy = policy, rank = rank, queue = queue, key = key, message = flagged(flags, MESSAGE),
    due = due, expires = expires, ttr = ttr, timeout = timeout, result_ttl = result_ttl,
    token = token, leased = leased, deadline = deadline, owner = owner,
    finished = finished_at, prune = prune, error = why, trail = trail, attempts = attempts,
  }
end

local function pack_job(j)
  local flags = bit.band(j.flags, CANCELLING + MESSAGE + NOTED + RESULT)
  local timed = j.due > 0 or j.expires > 0 or j.ttr >= 0 or j.timeout > 0 or j.result_ttl >= 0
  local tail = j.trail > 0 or j.error ~= ''
  if timed then flags = flags + TIMED end
  if tail then flags = flags + TAIL end
  local data = pack('>I8BBI4I4I4I4I4Bc0Bc0', j.seq, j.state, flags, j.attempt, j.losses, j.limit,
    j.policy, j.rank, #j.queue, j.queue, #j.key, j.key)
  if timed then data = data .. pack('>I8I8ddd', j.due, j.expires, j.ttr, j.timeout, j.result_ttl) end
  if j.state == RUNNING then
    data = data .. pack('>I8I8I8I2c0', j.token, j.leased, j.deadline, #j.owner, j.owner)
  elseif j.state >= SUCCEEDED then
    data = data .. pack('>I8I8', j.finished, j.prune)
  end
  if tail then
    data = data .. pack('>I4c0BI4c0', #j.error, j.error, j.trail, #j.attempts, j.attempts)
  end
  return data
end

local function read_ahead(ids)
  local missing = {}
  for _, id in ipairs(ids) do
    if jobs[id] == nil then missing[#missing + 1] = id end
  end
  for i, data in ipairs(fetch_all(K_JOB, missing)) do jobs[missing[i]] = data end
end

local function load_job(id)
  local j = jobs[id]
  if j == nil then j = call('HGET', K_JOB, id) end
  if type(j) == 'string' then j = parse_job(id, j) end
  jobs[id] = j
  return j or nil
end

local function touch_id(id)
  if not changed[id] then
    changed[id] = true
    change_list[#change_list + 1] = id
  end
end

local function save(j) touch_id(j.id) end

-- Add a line to what a job says; who calls this flags the job NOTED.
local function log(id, line, time)
  call('RPUSH', B .. ':g:' .. id, pack('>d', time) .. line)
  call('LTRIM', B .. ':g:' .. id, -100, -1)
end

local function set_result(j, result)
  j.flags = j.flags + RESULT
  results[j.id] = result
end

local function drop_result(j)
  if flagged(j.flags, RESULT) then
    j.flags = j.flags - RESULT
    results[j.id] = nil
    call('HDEL', K_RESULT, j.id)
  end
end

local function forget(j)
  jobs[j.id], envs[j.id], fresh[j.id] = false, nil, nil
  touch_id(j.id)
  drop_result(j)
  if flagged(j.flags, NOTED) then call('DEL', B .. ':p:' .. j.id, B .. ':g:' .. j.id) end
end

-- -- queues ----------------------------------------------------------------------------------------

local SIZES = {'waiting', 'scheduled', 'running'}
local KINDS = {'T', 'M', 'L'}

local function find_row(queue)
  local row = rows[queue]
  if row == nil then
    local found = call('HMGET', B .. ':q:' .. queue, 'paused', 'max_size')
    row = found[1] and {key = B .. ':q:' .. queue, paused = found[1] == '1', max_size = tonumber(found[2]), by = {}}
    rows[queue] = row
  end
  return row or nil
end

local function row_of(queue)
  local row = find_row(queue)
  if not row then -- a new queue
    row = {key = B .. ':q:' .. queue, paused = false, max_size = 0, by = {}}
    rows[queue] = row
    call('HSET', row.key, 'paused', 0, 'max_size', 0)
    call('ZADD', B .. ':queues', 0, queue)
  end
  return row
end

local function count(queue, counter, by)
  local row = row_of(queue)
  row.by[counter] = (row.by[counter] or 0) + by
end

-- What is ready is counted where it lies.
local function ready_of(queue)
  local ready = 0
  for _, kind in ipairs(KINDS) do ready = ready + call('ZCARD', B .. ':r:' .. kind .. queue) end
  return ready
end

-- Unfinished jobs; all that became ready must have been flushed.
local function size_of(queue)
  local row, size = row_of(queue), ready_of(queue)
  for i, value in ipairs(call('HMGET', row.key, unpack(SIZES))) do
    size = size + (tonumber(value) or 0) + (row.by[SIZES[i]] or 0)
  end
  return size
end

-- -- placing ---------------------------------------------------------------------------------------

local function line_of(j) return (j.message and 'M' or j.losses > 0 and 'L' or 'T') .. j.queue end

local function enter_line(line, rank, member)
  local args = entering[line]
  if not args then
    args = {}
    entering[line] = args
  end
  args[#args + 1] = rank_text(rank)
  args[#args + 1] = member
  rings[line] = (rings[line] or 0) + 1
end

local function flush_lines()
  for line, args in pairs(entering) do
    call_all('ZADD', B .. ':r:' .. line, args)
    if not row_of(sub(line, 2)).paused then call('ZADD', K_LINES, 0, line) end
  end
  entering = {}
end

local function add_due(time, member)
  call('ZADD', K_DUE, time, member)
  due_moved = true
end

-- Put a job that is nowhere into scheduled or ready, by its due time.
local function place(j, due)
  j.due = due
  if due > now then
    j.state = SCHEDULED
    count(j.queue, 'scheduled', 1)
    add_due(due, 'j' .. j.id)
  else
    j.state = READY
    enter_line(line_of(j), j.rank, pack('>I8', j.seq) .. j.id)
  end
  save(j)
end

-- Take a job that neither runs nor has finished out of what holds it.
local function unplace(j)
  if j.state == READY then
    flush_lines()
    call('ZREM', B .. ':r:' .. line_of(j), pack('>I8', j.seq) .. j.id)
  elseif j.state == SCHEDULED then
    call('ZREM', K_DUE, 'j' .. j.id)
  end
  if j.state ~= READY then count(j.queue, COUNTER[j.state], -1) end
end

local function drop_token(owner, token)
  local tokens = ended_leases[owner]
  if not tokens then
    tokens = {}
    ended_leases[owner] = tokens
  end
  tokens[#tokens + 1] = text_of(token)
end

-- Take a running job from its owner: whatever the owner says of it now is too late.
local function end_lease(j)
  drop_token(j.owner, j.token)
  if j.deadline > 0 then call('ZREM', K_DUE, 'l' .. j.id) end
  count(j.queue, 'running', -1)
  j.state, j.token = -1, 0
end

-- -- ending ----------------------------------------------------------------------------------------

local function keep_class(class)
  if not retention then
    local succeeded, _, failed, protect = unpk('>dddd', ARGV[2])
    retention = {[0] = succeeded, math.max(succeeded, protect), failed}
  end
  return retention[class]
end

local function keep_for(j, class)
  if j.state == SUCCEEDED and j.result_ttl >= 0 then return j.result_ttl * 1000000 end
  return keep_class(class)
end

local function prune_later(class, time, id)
  local args = finishing[class]
  args[#args + 1] = text_of(time)
  args[#args + 1] = id
end

local function class_of(j)
  if j.state == FAILED then return 2 end
  return j.state == SUCCEEDED and not flagged(j.flags, RESULT) and 0 or 1
end

-- Give up the key; who waited for it takes it over.
local function promote_successor(j)
  local holders = call('HGET', K_KEY, j.key)
  if not holders then return end
  local cut = string.find(holders, '\0', 1, true)
  local holder, successor = sub(holders, 1, cut - 1), sub(holders, cut + 1)
  if j.id == successor then
    call('HSET', K_KEY, j.key, holder .. '\0')
  elseif j.id == holder and successor == '' then
    call('HDEL', K_KEY, j.key)
  elseif j.id == holder then
    call('HSET', K_KEY, j.key, successor .. '\0')
    local waiting = load_job(successor)
    unplace(waiting)
    place(waiting, waiting.due)
  end
end

-- It is no longer among the unfinished: give up expiry and key, and tell who waits.
local function leave(j, keeps_key)
  if j.expires > 0 then call('ZREM', K_DUE, 'x' .. j.id) end
  if j.key ~= '' and not keeps_key then promote_successor(j) end
  finished[#finished + 1] = j.id
  if row_of(j.queue).max_size > 0 then shrunk[j.queue] = true end
end

-- Have a finished job pruned in its time.
local function keep(j)
  local class = class_of(j)
  j.prune = j.finished + keep_for(j, class)
  prune_later(class, j.prune, j.id)
  save(j)
end

-- Finish a job that is nowhere: kept for a while, or forgotten when an acked message.
local function finish(j, state, why, keeps_key)
  leave(j, keeps_key)
  count(j.queue, COUNTER[state], 1)
  if state == SUCCEEDED and j.message then
    forget(j)
    return
  end
  j.state, j.finished, j.error = state, now, why
  keep(j)
end

local function flush_finished()
  for class = 0, 2 do
    call_all('ZADD', B .. ':fin:' .. class, finishing[class])
    finishing[class] = {}
  end
end

-- Take a finished job off the list of what is to be pruned.
local function unfinish(j)
  flush_finished()
  call('ZREM', B .. ':fin:' .. class_of(j), j.id)
end

-- -- writing ---------------------------------------------------------------------------------------

local function flush()
  local gone, set, set_env, set_result_of, set_all = {}, {}, {}, {}, {}
  for _, id in ipairs(change_list) do
    local j = jobs[id]
    if j then
      set[#set + 1] = id
      set[#set + 1] = type(j) == 'string' and j or pack_job(j)
    else
      gone[#gone + 1] = id
    end
    if envs[id] then
      set_env[#set_env + 1] = id
      set_env[#set_env + 1] = envs[id]
      envs[id] = nil
    end
    if results[id] then
      set_result_of[#set_result_of + 1] = id
      set_result_of[#set_result_of + 1] = results[id]
      results[id] = nil
    end
    if fresh[id] then
      set_all[#set_all + 1] = text_of(fresh[id])
      set_all[#set_all + 1] = id
      fresh[id] = nil
    end
  end
  changed, change_list = {}, {}
  for owner, tokens in pairs(ended_leases) do call_all('HDEL', B .. ':l:' .. owner, tokens) end
  ended_leases = {}
  if #gone > 0 then
    call_all('HDEL', K_JOB, gone)
    call_all('HDEL', K_ENV, gone)
    call_all('ZREM', K_ALL, gone)
  end
  call_all('HSET', K_JOB, set)
  call_all('HSET', K_ENV, set_env)
  call_all('HSET', K_RESULT, set_result_of)
  call_all('ZADD', K_ALL, set_all)
  flush_lines()
  flush_finished()
end

local function flush_rows()
  for _, row in pairs(rows) do
    if row then
      for counter, by in pairs(row.by) do
        if by ~= 0 then call('HINCRBY', row.key, counter, by) end
      end
      row.by = {}
    end
  end
end
