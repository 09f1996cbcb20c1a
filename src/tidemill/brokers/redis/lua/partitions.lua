-- Partitions: each key of each limit by name.
--
-- A partition has a table of all its ready jobs for each line in which it has jobs. The first job of each table also
-- stands in the ready line, if the limiter lets it start. So a lease finds all jobs that may start in the line, and
-- never walks over jobs that may not. A change in a partition makes it *stale*; `sync` then corrects the ready lines.
-- Jobs of equal rank stand in a line by their number. The number is the seq. For the first job of a
-- partition with a key, it is the token of the partition's last lease, if that is higher. So keys take turns.
--
--   B:lane     hash    PARTITION (name, a zero byte, key) → see pack_partition; B:lanes zset, all 0, has them in order
--   B:lane:LINE\0PARTITION  zset seq8·id by rank  its ready jobs
--   B:parked:LINE      set  partitions that have ready jobs in the line
--   B:clear    zset    idle PARTITION by the time from which it may be forgotten: its limiter then equals a new one
-- B:due has a·PARTITION for partitions that time alone opens.

do

local CLEARS, STANDS = 1, 2
local FLAGS = 13 -- the offset of the flags

-- Pack the number of running jobs, the token of the last lease, flags (CLEARS: it can be forgotten when due; STANDS: a
-- job stands in each of its lines), due, and the limiter behind its size. Then for each line: its name, and 0, or 1
-- with the rank, number and id of the job that stands there.
local function pack_partition(partition)
  local limiter, flags, lines = Limiter.pack(partition.limiter), partition.clears and CLEARS or 0, ''
  local line, head = next(partition.lines)
  if line then flags = flags + STANDS end
  while line do
    if head then
      lines = lines .. pack('>I2c0BI4I8I2c0', #line, line, 1, head.rank, head.number, #head.id, head.id)
    else
      lines = lines .. pack('>I2c0B', #line, line, 0)
      flags = bit.band(flags, CLEARS)
    end
    line, head = next(partition.lines, line)
  end
  return pack('>I4I8BdI4c0', partition.running, partition.turn, flags, partition.due, #limiter, limiter) .. lines
end

local function parse_partition(data)
  local running, turn, flags, due, limiter, at = unpk('>I4I8BdI4c0', data)
  local partition = {running = running, turn = turn, clears = flagged(flags, CLEARS), due = due, limiter = Limiter.parse(limiter), lines = {}}
  while at <= #data do
    local line, stands
    line, stands, at = unpk('>I2c0B', data, at)
    partition.lines[line] = false
    if stands == 1 then
      local head = {}
      head.rank, head.number, head.id, at = unpk('>I4I8I2c0', data, at)
      partition.lines[line] = head
    end
  end
  return partition
end

-- The partition and the cost in a record. The record must be under a limit.
function Partitions.partition_of(data)
  local queue = byte(data, 31)
  local key = byte(data, 32 + queue)
  local name, cost = unpk('>I2c0d', data, 33 + queue + key)
  return name, cost
end

function Partitions.cost_of(id)
  local data = jobs[id]
  if type(data) ~= 'string' then return load_job(id).cost end
  return (select(2, Partitions.partition_of(data)))
end

-- Read the partitions of some jobs at once. The jobs must be read already.
function Partitions.read_ahead(ids)
  local names, known = {}, limits.partitions
  for _, id in ipairs(ids) do
    local data = jobs[id]
    if type(data) == 'string' and byte(data, 10) >= LIMITED then
      local name = Partitions.partition_of(data)
      if known[name] == nil then
        known[name] = false
        names[#names + 1] = name
      end
    end
  end
  for i, data in ipairs(fetch_all(B .. ':lane', names)) do known[names[i]] = data or nil end
end

function Partitions.of(name)
  local partition = limits.partitions[name]
  if type(partition) ~= 'table' then
    local data = partition or call('HGET', B .. ':lane', name)
    partition = data and parse_partition(data) or {is_new = true, running = 0, turn = 0, clears = false, due = 0, limiter = Limiter.new(), lines = {}}
    limits.partitions[name] = partition
  end
  return partition
end

function Partitions.split(name)
  local cut = string.find(name, '\0', 1, true)
  return sub(name, 1, cut - 1), sub(name, cut + 1)
end

function Partitions.park_of(line, name) return B .. ':lane:' .. line .. '\0' .. name end

-- Mark a partition for `sync`.
local function make_stale(name)
  limits.changed[name], limits.stale[name] = true, true
end
Partitions.make_stale = make_stale

-- Add to its partition a job that became ready.
function Partitions.enter(j)
  local line, partition = line_of(j), Partitions.of(j.partition)
  call('ZADD', Partitions.park_of(line, j.partition), j.rank, pack('>I8', j.seq) .. j.id)
  if partition.lines[line] == nil then
    partition.lines[line] = false
    call('SADD', B .. ':parked:' .. line, j.partition)
    local row = row_of(j.queue)
    if not row.partitioned then call('HSET', row.key, 'laned', 1) end
    row.partitioned = true
  end
  count(j.queue, 'parked', 1)
  local came = limits.came[j.partition]
  if not came then
    came = {}
    limits.came[j.partition] = came
  end
  came[line] = (came[line] or 0) + 1
  limits.changed[j.partition] = true
  local head = partition.lines[line] -- only a job with a better rank or an older number goes before the head
  if not head or j.rank < head.rank or j.rank == head.rank and j.seq < head.number then make_stale(j.partition) end
end

-- Remove a ready job from its partition.
function Partitions.leave(j)
  call('ZREM', Partitions.park_of(line_of(j), j.partition), pack('>I8', j.seq) .. j.id)
  count(j.queue, 'parked', -1)
  make_stale(j.partition)
end

-- Remove from its partition a job that was taken from the ready line.
function Partitions.taken(j)
  Partitions.of(j.partition).lines[line_of(j)] = false
  count(j.queue, 'parked', 1)
  Partitions.leave(j)
end

-- Count a job that was taken and is leased now.
function Partitions.start(j, token)
  local partition = Partitions.of(j.partition)
  Limiter.take(Settings.of_partition(j.partition), partition.limiter, j.cost)
  partition.running = partition.running + 1
  partition.turn = token
end

-- Count the end of a lease. If a job stands in each line of the partition, only the count changes: no other
-- job can come first.
function Partitions.ended(name)
  local partition = limits.partitions[name]
  limits.changed[name] = true
  if type(partition) == 'string' and flagged(byte(partition, FLAGS), STANDS) then -- the hot path
    limits.partitions[name] = pack('>I4', unpk('>I4', partition) - 1) .. sub(partition, 5)
    return
  end
  partition = Partitions.of(name)
  partition.running = partition.running - 1
  local line, head = next(partition.lines)
  while head do line, head = next(partition.lines, line) end
  if line or not next(partition.lines) and partition.running == 0 then make_stale(name) end
end

-- Give back the tokens of a lease whose job never ran.
function Partitions.give_back(j)
  Limiter.give_back(Settings.of_partition(j.partition), Partitions.of(j.partition).limiter, j.leased, j.cost)
  make_stale(j.partition)
end

function Partitions.came_due(name)
  local partition = Partitions.of(name)
  partition.due, partition.clears = 0, false
  make_stale(name)
end

-- Replace the job of a partition that stands in a ready line by another job, or by none.
local function stand(line, old, new)
  local queue = sub(line, 2)
  if old then
    flush_lines()
    call('ZREM', B .. ':r:' .. line, pack('>I8', old.number) .. old.id)
    count(queue, 'parked', 1)
  end
  if new then
    add_to_line(line, new.rank, pack('>I8', new.number) .. new.id)
    count(queue, 'parked', -1)
  end
end

-- Set the timer of a partition: to `opening`, the earliest start of its next job, or to the time of forgetting it.
function Partitions.arm(name, partition, settings, opening)
  local due, clears = opening < Limiter.NEVER and opening or 0, false
  if not next(partition.lines) and partition.running == 0 then
    local clear = Limiter.clear_at(settings, partition.limiter)
    due, clears = clear > now and clear or 0, true
  end
  if due == partition.due and (due == 0 or clears == partition.clears) then return end
  if partition.due > 0 then
    if partition.clears then call('ZREM', B .. ':clear', name) else call('ZREM', K_DUE, 'a' .. name) end
  end
  if due > 0 and clears then
    call('ZADD', B .. ':clear', due, name)
  elseif due > 0 then
    add_due(due, 'a' .. name)
  end
  partition.due, partition.clears = due, clears
end

-- Wake sleepers for `more` jobs of a line, or for as many as the limiter lets start; at least one.
local function ring_partition(partition, settings, line, more)
  rings[line] = (rings[line] or 0) + math.max(1, Limiter.room(settings, partition.limiter, partition.running, more))
end

local function sync_partition(name, rung)
  local partition, came = Partitions.of(name), limits.came[name] or {}
  limits.stale[name], limits.came[name] = nil, nil
  local key = select(2, Partitions.split(name))
  local settings, opening = Settings.of_partition(name), Limiter.NEVER
  local lines = {}
  for line in pairs(partition.lines) do lines[#lines + 1] = line end
  for _, line in ipairs(lines) do
    local head, want = partition.lines[line], false
    local first = call('ZRANGE', Partitions.park_of(line, name), 0, 0, 'WITHSCORES')
    if first[1] then
      local id = sub(first[1], 9)
      local paced = settings.rate or settings.window
      local when = Limiter.opens(settings, partition.limiter, partition.running, paced and Partitions.cost_of(id) or 1)
      if when > 0 then
        opening = math.min(opening, when)
      else
        local number = unpk('>I8', first[1])
        want = {rank = tonumber(first[2]), number = key ~= '' and math.max(number, partition.turn) or number, id = id}
      end
      partition.lines[line] = want
    else
      partition.lines[line] = nil
      call('SREM', B .. ':parked:' .. line, name)
    end
    local same = head and want and head.rank == want.rank and head.number == want.number and head.id == want.id
    if (head or want) and not same then stand(line, head, want) end
    if want and rung and (came[line] or not head) then ring_partition(partition, settings, line, came[line] or 1) end
  end
  Partitions.arm(name, partition, settings, opening)
end

-- Let the next job of a partition take the place of a leased one. No sleeper is woken for it.
function Partitions.follow(name) sync_partition(name, false) end

-- Correct the ready lines for every partition that has changed. `sync` also wakes sleepers and sets timers for queues
-- whose limiter opened or closed.
function Limits.sync_partitions()
  local name = next(limits.stale)
  while name do
    sync_partition(name, true)
    name = next(limits.stale)
  end
  for partition, came in pairs(limits.came) do -- jobs that came behind the heads, in partitions that are not stale
    for line, more in pairs(came) do ring_partition(Partitions.of(partition), Settings.of_partition(partition), line, more) end
  end
  limits.came = {}
end

function Limits.sync()
  Limits.sync_partitions()
  flush_lines()
  for queue, row in pairs(rows) do
    if row and row.limiter then QueueLimits.sync(queue, row) end
  end
end

-- Mark idle partitions that can be forgotten; `flush` forgets them. Returns how many were checked.
function Limits.sweep(most)
  local names = call('ZRANGEBYSCORE', B .. ':clear', '-inf', now, 'LIMIT', 0, most)
  for _, name in ipairs(names) do
    call('ZREM', B .. ':clear', name)
    Partitions.came_due(name)
  end
  return #names
end

function Limits.flush()
  for queue, row in pairs(rows) do
    if row and row.limiter_changed then
      call('HSET', B .. ':gate', queue, pack('>d', row.limiter_due) .. Limiter.pack(row.limiter))
      row.limiter_changed = false
    end
  end
  local set, new, gone = {}, {}, {}
  for name in pairs(limits.changed) do
    local partition = limits.partitions[name]
    if type(partition) == 'string' then
      set[#set + 1] = name
      set[#set + 1] = partition
    elseif next(partition.lines) or partition.running > 0 or partition.due > 0 then
      set[#set + 1] = name
      set[#set + 1] = pack_partition(partition)
      if partition.is_new then
        new[#new + 1] = '0'
        new[#new + 1] = name
      end
      partition.is_new = false
    else
      gone[#gone + 1] = name
      partition.is_new = true
    end
  end
  call_all('HSET', B .. ':lane', set)
  call_all('ZADD', B .. ':lanes', new)
  call_all('HDEL', B .. ':lane', gone)
  call_all('ZREM', B .. ':lanes', gone)
  limits.changed = {}
end

end
