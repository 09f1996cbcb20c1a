-- Jobs of unknown tasks: set aside until a worker knows the task. Their state is scheduled, and their due time is 0.
--
--   B:aside    hash    id → task
--   B:a:TASK\0QUEUE    zset    seq8·id by rank; B:a:TASK  zset  queues that have such jobs, all 0
--   B:unknown  zset    task by its number, in the order in which the tasks came
--   B:z:U      zset    sleepers that may know one of these tasks
-- B:due has u·ID by the time at which a job fails.

do

Unknown.OUTCOME = 8
local K_TOLD_MOST, COUNTED = 1000, 99

local function key_of(task, queue) return B .. ':a:' .. task .. '\0' .. queue end

local function member_of(j) return pack('>I8', j.seq) .. j.id end

-- True for a job that is set aside.
function Unknown.is_aside(j) return j.state == SCHEDULED and j.due == 0 end

-- The task of a job: the third field of its envelope, which is an array in msgpack.
local function task_of(id)
  local envelope = call('HGET', K_ENV, id)
  local first = byte(envelope)
  local _, _, _, task = cmsgpack.unpack_limit(envelope, 3, first == 0xdc and 3 or first == 0xdd and 5 or 1)
  return task
end

-- Write a job that no table holds into the index; true when it is the first of its task.
local function enter(j, until_)
  local task = task_of(j.id)
  j.state, j.due = SCHEDULED, 0
  count(j.queue, 'scheduled', 1)
  call('HSET', B .. ':aside', j.id, task)
  call('ZADD', key_of(task, j.queue), j.rank, member_of(j))
  call('ZADD', B .. ':a:' .. task, 0, j.queue)
  if until_ then add_due(until_, 'u' .. j.id) end
  save(j)
  if call('ZSCORE', B .. ':unknown', task) then return false end
  call('ZADD', B .. ':unknown', call('INCR', B .. ':seq'), task)
  return true
end

-- Hint all sleepers that may know a task.
function Unknown.wake()
  local key = B .. ':z:U'
  for _, sleeper in ipairs(call('ZRANGE', key, 0, -1)) do
    if call('ZREM', K_ASLEEP, sleeper) == 1 then hint(sleeper) end
  end
  call('DEL', key)
end

-- Set aside a job that no table holds, and wake sleepers that may know its task. `until_`, if given, is the time at
-- which the job fails.
function Unknown.put_aside(j, until_)
  if enter(j, until_) then hint_everybody() else Unknown.wake() end
end

-- Take a job out of the index. The task is forgotten with its last job.
function Unknown.leave(j)
  local task = call('HGET', B .. ':aside', j.id)
  call('HDEL', B .. ':aside', j.id)
  call('ZREM', K_DUE, 'u' .. j.id)
  call('ZREM', key_of(task, j.queue), member_of(j))
  if call('EXISTS', key_of(task, j.queue)) == 1 then return end
  call('ZREM', B .. ':a:' .. task, j.queue)
  if call('EXISTS', B .. ':a:' .. task) == 0 then call('ZREM', B .. ':unknown', task) end
end

-- The first jobs of some tasks, by queue.
local function first_of(tasks, queues, many)
  local by_queue = {}
  for _, task in ipairs(tasks) do
    for _, queue in ipairs(#queues > 0 and queues or call('ZRANGE', B .. ':a:' .. task, 0, -1)) do
      local found = call('ZRANGE', key_of(task, queue), 0, many - 1, 'WITHSCORES')
      local entries = by_queue[queue] or {}
      for i = 1, #found, 2 do entries[#entries + 1] = {tonumber(found[i + 1]), number_in(found[i]), sub(found[i], 9)} end
      by_queue[queue] = entries
    end
  end
  return by_queue
end

-- Make the first jobs of some tasks ready, up to `many` of each queue: {{id, time at which it would have failed}, …}.
function Unknown.bring_back(tasks, queues, many)
  local back = {}
  for queue, entries in pairs(first_of(tasks, queues, many)) do
    local row = #entries > 0 and find_row(queue)
    table.sort(entries, function(a, b) return a[1] < b[1] or a[1] == b[1] and a[2] < b[2] end)
    for i = 1, row and not row.paused and math.min(many, #entries) or 0 do
      local j = load_job(entries[i][3])
      local until_ = call('ZSCORE', K_DUE, 'u' .. j.id)
      unplace(j)
      place(j, 0)
      local line = line_of(j)
      -- Hint no sleeper: the step leases this job itself, or sets the job aside again.
      if not j.partition then rings[line] = rings[line] > 1 and rings[line] - 1 or nil end
      back[#back + 1] = {j.id, until_}
    end
  end
  return back
end

-- Remove a job of `bring_back` from its line, to lease the job. Return nil for a job that stays in the line.
function Unknown.take_out(id)
  local j = load_job(id)
  if j.partition or row_of(j.queue).limiter or j.losses > 0 then return nil end
  unplace(j)
  return j
end

-- Set aside again the jobs that were not leased. Jobs under a limit stay in their line. Without `tasks`,
-- suspects stay too.
function Unknown.undo(back, tasks)
  for _, entry in ipairs(back) do
    local j = load_job(entry[1])
    local stays = j.partition or row_of(j.queue).limiter or j.losses > 0 and not tasks
    if j.state == READY and not stays then
      unplace(j)
      enter(j, entry[2])
    end
  end
end

-- The last number and the names of tasks with a number above `told`; also whether more tasks follow.
function Unknown.tell(told)
  local found = call('ZRANGEBYSCORE', B .. ':unknown', '(' .. told, '+inf', 'WITHSCORES', 'LIMIT', 0, K_TOLD_MOST)
  if #found == 0 then return {told}, false end
  local reply = {found[#found]}
  for i = 1, #found, 2 do reply[#reply + 1] = found[i] end
  return reply, #found == 2 * K_TOLD_MOST
end

-- For inspection: {task, queues, number of jobs, envelope of the oldest} of all tasks.
function Unknown.show()
  local all = {}
  for _, task in ipairs(call('ZRANGE', B .. ':unknown', 0, -1)) do
    local queues, many, oldest = call('ZRANGE', B .. ':a:' .. task, 0, -1), 0, nil
    for _, queue in ipairs(queues) do
      many = many + call('ZCARD', key_of(task, queue))
      for _, member in ipairs(call('ZRANGE', key_of(task, queue), 0, COUNTED)) do
        if not oldest or number_in(member) < number_in(oldest) then oldest = member end
      end
    end
    all[#all + 1] = {task, queues, many, oldest and call('HGET', K_ENV, sub(oldest, 9)) or ''}
  end
  return all
end

end
