-- The keys of the store, and the state of one call: the data it has read, and the changes it will write.
--
-- All files together are one library of server functions (script_library.py); each verb is a function of it.
-- KEYS[1] is the store's hash tag, B below. All other keys begin with it and are made here, so that
-- they lie in one slot of a cluster.
--
--   B:job      hash    id → record           see pack_job
--   B:env      hash    id → envelope         Lua reads only its task and its retry policy
--   B:result   hash    id → result           of a job that has a result
--   B:all      zset    id by seq             all jobs, to list them newest first
--   B:r:LINE   zset    seq8·id by rank       jobs to lease; the name of a line is a kind, L, M or T, and a queue
--                                        (L suspects: tasks that were lost and run alone, M messages, T tasks)
--   B:lines    zset    LINE, all 0           lines that are not paused and may have ready jobs
--   B:due      zset    by time: j·id a scheduled job is due, x·id a job expires, l·id a message's lease ends,
--                      f B:flow goes on, a·PARTITION or g·QUEUE a limit opens,
--                      w·NAME the change of a limit goes on
--   B:l:OWNER  hash    token → id            leases; the token in the record decides which lease is valid
--   B:key      hash    key → its holder      see unique.lua; B:held zset, key by the end of its hold
--   B:fin:N    zset    id by prune time      finished: 0 without result, 1 with result, cancelled or expired, 2 failed or purged;
--                                        3 linked with other jobs, by the time to check whether a job still needs it
--   B:link     hash    id → links of a job before or after others, from the wish of its put, see put_accept.lua
--   B:wait     hash    id → pending, failures, wait condition, 1 if the job was dropped (ended because of jobs before
--                                        it); only for jobs that come after others
--   B:flow     list    ends that are not counted down yet, see workflows.lua
--   B:q:QUEUE  hash    paused, max_size, moved, gated, laned; a counter for each state but ready, and each total
--   B:queues   zset    queue, all 0
--   B:p:ID     string  progress of a job, and its text     B:g:ID  list  its log
--   B:o:OWNER  hash    record, name, kind, number, host, epoch of its attach; serial and answer of its last step;
--                                        last queue; slept, the time it last fell asleep; roster, a new number when the
--                                        list of owners changes; for a remote owner its lease in seconds, and
--                                        words, the number of its calls
--   B:beat     zset    owner by the time at which it is given up; inf (never) for a remote owner
--   B:c:OWNER  list    commands left for the owner
--   B:asleep   zset    sleeping owner by the time at which it looks again
--   B:z:KIND B:z:LINE  zset  sleeper by the time it fell asleep; an entry is outdated if its owner is awake,
--                                        or has fallen asleep again at another time
--   B:waits    hash    id → channels of the sleepers that wait for its end; B:space:QUEUE set, for room
--   B:said:S   string  serial and reply of the last call of session S, kept 10 minutes
--   B:terms, B:gate, B:lane, B:lanes, B:lane:…, B:parked:LINE, B:clear, B:walk   limits, see limits.lua, partitions.lua
--   B:schedule hash    name → record         see schedules.lua; B:schedules zset, all 0, has the names in order
--   B:firing, B:claimed  zset  version8·schedule by the time to hand it out, for the first time or again
--   B:fires    zset    owner that handles schedules, by the next due time that it was told
--   B:counts, B:sums:…, B:periods:…, B:kinds, B:folds   rows of history, see history.lua
--   B:departure hash   mark, where, sealed: the whole store moves to another store
--   B:from:MARK hash   cursor, first: how far a departed store was taken in, and where its numbers begin
--   B:seq      string  the last number drawn: jobs and tokens are numbered from the same sequence
--   B:numbers string   the last number that was given away, see job_numbers.lua
--   B:format, B:born, B:barrier  string; barrier is empty: written before a WAIT for replicas that follows a repeated call
--   channel B:w:SLEEPER  a hint
--
-- Times are microseconds of the server's clock plus ARGV[1], with which tests move the time. ARGV[2]
-- is retention (see keep_for), ARGV[3] and ARGV[4] are the session and serial of the call, or empty.

local WAITING, SCHEDULED, READY, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED = 0, 1, 2, 3, 4, 5, 6, 7
local COUNTER = {[0] = 'waiting', 'scheduled', nil, 'running', 'succeeded', 'failed', 'cancelled', 'expired'}
local CANCELLING, MESSAGE, NOTED, TIMED, TAIL, RESULT, LINKED, LIMITED = 1, 2, 4, 8, 16, 32, 64, 128
local TOO_LATE = 'not started before it expired'
local NOT_STARTED = 'cancelled before it started'
local Unique = {} -- see unique.lua
local Verbs = {} -- verb → the Lua function behind the server's function
local CHUNK = 1000 -- arguments of one command at most; Lua's stack ends at 8000
local FLOW_MOST, AT_ONCE = 1000, 100 -- links that one call follows at most, and links of one entry in B:flow

-- The state of one call; `begin` makes all of it anew.
local call, pack, unpk, sub, byte -- these functions do not exist yet while the library is loaded
local ARGV, now
local B, K_JOB, K_ENV, K_RESULT, K_ALL, K_DUE, K_KEY, K_LINES, K_ASLEEP, K_WAITS, K_LINK, K_WAIT, K_FLOW
-- Jobs that the call has read or will write, by id: a record, its bytes, or false when there is none. `flush`
-- does the collected writes. Functions do not roll back, so nothing may fail after `flush`.
local jobs, envs, results
local changed, change_list
local fresh -- id → seq of new jobs
local rows -- queue → settings, and changes of its counters; false when there is no such queue
local entering -- LINE → arguments of ZADD
local finishing -- class → arguments of ZADD
local ended_leases -- OWNER → tokens
local rings, finished, shrunk -- sleepers to wake: LINE → number of jobs; ids that ended; queues with room
local due_moved -- true when B:due has changed, or when the sleeper that looks next may be awake or gone
local seq -- the last number drawn for a new job
local known_texts -- number → its text
local limits -- settings, partitions, and the names of changed and stale partitions: see partitions.lua
local flows -- the state and the work of jobs that come before or after others: see workflows.lua
local retention -- class → microseconds, or nil before the first use

local function begin_lightly(keys, args)
  call, pack, unpk, sub, byte = redis.call, struct.pack, struct.unpack, string.sub, string.byte
  ARGV = args
  if keys[1] ~= B then
    B = keys[1]
    K_JOB, K_ENV, K_RESULT, K_ALL = B .. ':job', B .. ':env', B .. ':result', B .. ':all'
    K_DUE, K_KEY = B .. ':due', B .. ':key'
    K_LINES, K_ASLEEP, K_WAITS = B .. ':lines', B .. ':asleep', B .. ':waits'
    K_LINK, K_WAIT, K_FLOW = B .. ':link', B .. ':wait', B .. ':flow'
  end
end

local function begin(keys, args)
  begin_lightly(keys, args)
  local time = call('TIME')
  now = time[1] * 1000000 + time[2] + args[1]
  jobs, envs, results, changed, change_list, fresh = {}, {}, {}, {}, {}, {}
  rows, entering, finishing, ended_leases = {}, {}, {[0] = {}, {}, {}, {}}, {}
  limits = {settings = {}, partitions = {}, changed = {}, stale = {}, came = {}, walking = false}
  limits.left = 100 -- partitions that one call carries changed settings into
  flows = {links = {}, new = {}, unlinked = {}, waits = {}, counted = {}, ends = {}, first = 1, left = FLOW_MOST}
  rings, finished, shrunk, due_moved, seq, retention, known_texts = {}, {}, {}, false, 0, nil, {}
end

local function flagged(flags, flag) return bit.band(flags, flag) ~= 0 end

-- The number in the first eight bytes. Never compare these bytes as strings: Lua compares strings by the locale of
-- the server.
local function number_in(bytes) return (unpk('>I8', bytes)) end

-- The functions of limits.lua and partitions.lua, for the files that are loaded before them.
local QueueLimits, Partitions = {}, {}

-- A number as text: the server would print it as a double, which takes longer than most commands.
local function text_of(number) return string.format('%d', number) end

-- The same for a number that the call needs more than once.
local function known_text(number)
  local text = known_texts[number]
  if not text then
    text = text_of(number)
    known_texts[number] = text
  end
  return text
end

-- Call a command with any number of arguments, in pieces. CHUNK is even, so pairs stay together.
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

-- -- repeated calls --------------------------------------------------------------------------------

-- The reply to this call, if it was done already and its reply was lost. A request may also arrive
-- after later requests of its session: then it was repeated and answered long ago.
local function cached_reply()
  if ARGV[3] == '' then return nil end
  local cached = call('GET', B .. ':said:' .. ARGV[3])
  if cached and #cached > 8 and number_in(cached) >= number_in(ARGV[4]) then return cmsgpack.unpack(sub(cached, 9)) end
  return nil
end

local function cache_reply(reply)
  if ARGV[3] ~= '' then
    call('SET', B .. ':said:' .. ARGV[3], ARGV[4] .. cmsgpack.pack(reply), 'EX', 600)
  end
  return reply
end

-- {'moved', where} while the store moves to another store, else nil. A departing store refuses changes by callers.
-- A sealed store makes no changes by time either. Each queue's row repeats `moved`, for calls that read only the row.
local function departure()
  local where = call('HGET', B .. ':departure', 'where')
  return where and {'moved', where}
end

local function is_sealed() return call('HGET', B .. ':departure', 'sealed') == '1' end

-- -- records ---------------------------------------------------------------------------------------

-- A record is: seq, state, flags, attempt, losses, limit, policy, rank, queue, key; if LIMITED, its partition and
-- its cost there; if TIMED, due, expires, ttr, timeout, result_ttl; if running, token, leased, deadline, owner; if
-- finished, the times of its end and of pruning; if TAIL, error and attempts. The client writes all of a new record
-- but the seq.
local function parse_job(id, data)
  local seq, state, flags, attempt, losses, limit, policy, rank, queue, key, at =
    unpk('>I8BBI4I4I4I4I4Bc0Bc0', data)
  local partition, cost = nil, 0
  if flagged(flags, LIMITED) then partition, cost, at = unpk('>I2c0d', data, at) end
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
    policy = policy, rank = rank, queue = queue, key = key, partition = partition, cost = cost, message = flagged(flags, MESSAGE),
    due = due, expires = expires, ttr = ttr, timeout = timeout, result_ttl = result_ttl,
    token = token, leased = leased, deadline = deadline, owner = owner,
    finished = finished_at, prune = prune, error = why, trail = trail, attempts = attempts,
  }
end

local function pack_job(j)
  local flags = bit.band(j.flags, CANCELLING + MESSAGE + NOTED + RESULT + LINKED + LIMITED)
  local timed = j.due > 0 or j.expires > 0 or j.ttr >= 0 or j.timeout > 0 or j.result_ttl >= 0
  local tail = j.trail > 0 or j.error ~= ''
  if timed then flags = flags + TIMED end
  if tail then flags = flags + TAIL end
  local data = pack('>I8BBI4I4I4I4I4Bc0Bc0', j.seq, j.state, flags, j.attempt, j.losses, j.limit,
    j.policy, j.rank, #j.queue, j.queue, #j.key, j.key)
  if j.partition then data = data .. pack('>I2c0d', #j.partition, j.partition, j.cost) end
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

-- Flag a job NOTED, and add a line to its log, unless the line is empty.
local function log(j, line, time)
  if not flagged(j.flags, NOTED) then
    j.flags = j.flags + NOTED
    save(j)
  end
  if line == '' then return end
  call('RPUSH', B .. ':g:' .. j.id, pack('>d', time) .. line)
  call('LTRIM', B .. ':g:' .. j.id, -100, -1)
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

-- -- links -----------------------------------------------------------------------------------------

local NO_LINKS = {delay = 0, at = 0, waits = 0, next = {}, inputs = {}}
local LINKS_WAITS = 26 -- the offset of the wait condition in a wish; the number of inputs follows

local function parse_links(wish)
  local _, delay, at, _, waits, inputs, many, from = unpk('>BdddBI4I4', wish)
  local links = {delay = delay, at = at, waits = waits, next = {}, inputs = {}}
  for i = 1, many do links.next[i], from = unpk('>I2c0', wish, from) end
  for i = 1, inputs do links.inputs[i], from = unpk('>I2c0', wish, from) end
  return links
end

local function read_links_ahead(ids)
  local missing, links = {}, flows.links
  for _, id in ipairs(ids) do
    if links[id] == nil then missing[#missing + 1] = id end
  end
  for i, wish in ipairs(fetch_all(K_LINK, missing)) do links[missing[i]] = wish end
end

local function links_of(id)
  local links = flows.links[id]
  if links == nil then links = call('HGET', K_LINK, id) end
  if type(links) == 'string' then links = parse_links(links) end
  flows.links[id] = links
  return links or NO_LINKS
end

local function parse_wait(data)
  local pending, failures, what, dropped = unpk('>I4I4BB', data)
  return {pending = pending, failures = failures, what = what, dropped = dropped == 1}
end

local function read_waits_ahead(ids)
  local missing, waits = {}, flows.waits
  for _, id in ipairs(ids) do
    if waits[id] == nil then missing[#missing + 1] = id end
  end
  for i, data in ipairs(fetch_all(K_WAIT, missing)) do waits[missing[i]] = data and parse_wait(data) end
end

-- The counts of the jobs before a job; nil when there are no such jobs.
local function wait_of(id)
  local wait = flows.waits[id]
  if wait == nil then
    local data = call('HGET', K_WAIT, id)
    wait = data and parse_wait(data)
    flows.waits[id] = wait
  end
  return wait or nil
end

-- Record that a job ended, or was deleted before its end (state WAITING): the jobs after it wait for one job fewer.
local function add_end(id, state)
  local behind, ends = links_of(id).next, flows.ends
  -- A call counts down all ends that it causes itself. Only the ends that follow from these are bounded.
  if not flows.flowing then flows.left = flows.left + math.min(#behind, AT_ONCE) end
  if #behind <= AT_ONCE then
    if #behind > 0 then ends[#ends + 1] = {state, id, behind} end
    return
  end
  for from = 1, #behind, AT_ONCE do
    ends[#ends + 1] = {state, id, {unpack(behind, from, math.min(from + AT_ONCE - 1, #behind))}}
  end
end

local function unlink(id)
  flows.links[id], flows.new[id], flows.waits[id], flows.counted[id] = false, nil, false, nil
  flows.unlinked[#flows.unlinked + 1] = id
end

local function flush_links()
  if #flows.unlinked == 0 and not next(flows.new) and not next(flows.counted) then return end
  call_all('HDEL', K_LINK, flows.unlinked)
  call_all('HDEL', K_WAIT, flows.unlinked)
  local new, counted = {}, {}
  for id, wish in pairs(flows.new) do
    new[#new + 1] = id
    new[#new + 1] = wish
  end
  for id in pairs(flows.counted) do
    local wait = flows.waits[id]
    counted[#counted + 1] = id
    counted[#counted + 1] = pack('>I4I4BB', wait.pending, wait.failures, wait.what, wait.dropped and 1 or 0)
  end
  call_all('HSET', K_LINK, new)
  call_all('HSET', K_WAIT, counted)
  flows.unlinked, flows.new, flows.counted = {}, {}, {}
end

local function forget(j)
  jobs[j.id], envs[j.id], fresh[j.id] = false, nil, nil
  touch_id(j.id)
  drop_result(j)
  if flagged(j.flags, LINKED) then unlink(j.id) end
  if flagged(j.flags, NOTED) then call('DEL', B .. ':p:' .. j.id, B .. ':g:' .. j.id) end
end
