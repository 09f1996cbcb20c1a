-- The transitions of jobs from state to state, and the writes of a call.

-- -- queues ----------------------------------------------------------------------------------------

local SIZES = {'waiting', 'scheduled', 'running'}
local KINDS = {'T', 'M', 'L'}

local function find_row(queue)
  local row = rows[queue]
  if row == nil then
    local found = call('HMGET', B .. ':q:' .. queue, 'paused', 'max_size', 'gated', 'laned')
    row = found[1] and {key = B .. ':q:' .. queue, paused = found[1] == '1', max_size = tonumber(found[2]), by = {}}
    rows[queue] = row
    if row and found[4] then row.partitioned = true end
    if row and found[3] then QueueLimits.load(queue, row) end
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
    local found = call('HMGET', row.key, 'gated', 'laned') -- the limit of a forgotten queue stays
    if found[2] then row.partitioned = true end
    if found[1] then QueueLimits.load(queue, row) end
  end
  return row
end

local function count(queue, counter, by)
  local row = row_of(queue)
  row.by[counter] = (row.by[counter] or 0) + by
end

-- The number of ready jobs: those in the lines, and those that the row counts as `parked` behind limits.
local function ready_of(queue)
  local row = row_of(queue)
  local ready = (tonumber(call('HGET', row.key, 'parked')) or 0) + (row.by.parked or 0)
  for _, kind in ipairs(KINDS) do ready = ready + call('ZCARD', B .. ':r:' .. kind .. queue) end
  return ready
end

-- The number of unfinished jobs. All jobs that became ready must be flushed first.
local function size_of(queue)
  local row, size = row_of(queue), ready_of(queue)
  for i, value in ipairs(call('HMGET', row.key, unpack(SIZES))) do
    size = size + (tonumber(value) or 0) + (row.by[SIZES[i]] or 0)
  end
  return size
end

-- -- placing ---------------------------------------------------------------------------------------

local function line_of(j) return (j.message and 'M' or j.losses > 0 and 'L' or 'T') .. j.queue end

local function add_to_line(line, rank, member)
  local args = entering[line]
  if not args then
    args = {}
    entering[line] = args
  end
  args[#args + 1] = known_text(rank)
  args[#args + 1] = member
end

local function enter_line(line, rank, member)
  add_to_line(line, rank, member)
  rings[line] = (rings[line] or 0) + 1
end

local function flush_lines()
  for line, args in pairs(entering) do
    call_all('ZADD', B .. ':r:' .. line, args)
    local row = row_of(sub(line, 2))
    if not row.paused and row.listed ~= line then call('ZADD', K_LINES, 0, line) end
    row.listed = line -- holds for this call, unless the line is found empty
  end
  entering = {}
end

local function add_due(time, member)
  call('ZADD', K_DUE, time, member)
  due_moved = true
end

-- Make a job scheduled or ready, by its due time. No table may hold the job before.
local function place(j, due)
  j.due = due
  if due > now then
    j.state = SCHEDULED
    count(j.queue, 'scheduled', 1)
    add_due(due, 'j' .. j.id)
  else
    j.state = READY
    if j.partition then Partitions.enter(j) else enter_line(line_of(j), j.rank, pack('>I8', j.seq) .. j.id) end
  end
  save(j)
end

-- Remove a job that neither runs nor has finished from the table that holds it.
local function unplace(j)
  if j.state == READY and j.partition then
    Partitions.leave(j)
  elseif j.state == READY then
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
  tokens[#tokens + 1] = known_text(token)
end

-- Take a running job from its owner: a later verdict of the owner comes too late.
local function end_lease(j)
  drop_token(j.owner, j.token)
  if j.deadline > 0 then call('ZREM', K_DUE, 'l' .. j.id) end
  count(j.queue, 'running', -1)
  if j.partition then Partitions.ended(j.partition) end
  j.state, j.token = -1, 0
end

-- -- ending ----------------------------------------------------------------------------------------

local function keep_class(class)
  if not retention then
    local succeeded, _, failed, protect = unpk('>dddd', ARGV[2])
    retention = {[0] = succeeded, math.max(succeeded, protect), failed, protect}
  end
  return retention[class]
end

local function keep_for(j, class)
  if j.state == SUCCEEDED and j.result_ttl >= 0 then return j.result_ttl * 1000000 end
  return keep_class(class)
end

local function prune_later(class, time, id)
  local args = finishing[class]
  args[#args + 1] = known_text(time)
  args[#args + 1] = id
end

local PURGED = 'purged, in purge ' -- the beginning of the error of a purged job: see core/job.py

local function class_of(j)
  if j.state == FAILED or sub(j.error, 1, #PURGED) == PURGED then return 2 end
  return j.state == SUCCEEDED and not flagged(j.flags, RESULT) and 0 or 1
end

-- A job ends or is deleted: drop its expiry and its key, and tell sleepers and its dependents.
local function leave(j, state, keeps_key)
  if flagged(j.flags, LINKED) then add_end(j.id, state) end
  if j.expires > 0 then call('ZREM', K_DUE, 'x' .. j.id) end
  if j.key ~= '' and not keeps_key then Unique.give_up(j, state) end
  finished[#finished + 1] = j.id
  if row_of(j.queue).max_size > 0 then shrunk[j.queue] = true end
end

-- Set the time for pruning a finished job. A linked job is checked first: other jobs may need it, or move after it.
local function keep(j, moved)
  if flagged(j.flags, LINKED) then
    local wait = keep_class(3)
    if not moved and j.state == SUCCEEDED then wait = math.min(wait, keep_for(j, 3)) end
    j.prune = now + wait
    prune_later(3, j.prune, j.id)
  else
    local class = class_of(j)
    j.prune = j.finished + keep_for(j, class)
    prune_later(class, j.prune, j.id)
  end
  save(j)
end

-- Finish a job that no table holds: keep it for a while, or forget an acked message.
local function finish(j, state, why, keeps_key)
  leave(j, state, keeps_key)
  count(j.queue, COUNTER[state], 1)
  if state == SUCCEEDED and j.message then
    forget(j)
    return
  end
  j.state, j.finished, j.error = state, now, why
  keep(j)
end

local function flush_finished()
  for class = 0, 3 do
    call_all('ZADD', B .. ':fin:' .. class, finishing[class])
    finishing[class] = {}
  end
end

-- Take a finished job off the list of jobs to prune.
local function unfinish(j)
  flush_finished()
  if flagged(j.flags, LINKED) and call('ZREM', B .. ':fin:3', j.id) == 1 then return end
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
  flush_links()
  flush_lines()
  flush_finished()
end

local function flush_rows()
  for _, row in pairs(rows) do
    if row then
      for counter, by in pairs(row.by) do
        if by ~= 0 then call('HINCRBY', row.key, counter, by) end
      end
      if row.base then row.base = row.base + (row.by.running or 0) end
      row.by = {}
    end
  end
end
