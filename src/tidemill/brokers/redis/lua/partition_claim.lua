-- Partition claims: the jobs that one step takes from the partitions of a line. A run is one pass through a line.
--
-- The first job of a partition stands in the ready line; the next jobs come from the partition's own table. A heap
-- holds the next job of each partition, which is written to the line only if the run does not take it. The jobs taken
-- from a table are always its first jobs, so one command for each table removes them. The limiter of a partition gives the
-- tokens for all of its jobs together.

do

local Claims = {}
Partitions.Claims = Claims

local function before(a, b) return a.rank < b.rank or a.rank == b.rank and a.turn < b.turn end

local function push(heap, one)
  local at = #heap + 1
  while at > 1 do
    local above = math.floor(at / 2)
    if not before(one, heap[above]) then break end
    heap[at] = heap[above]
    at = above
  end
  heap[at] = one
end

local function pop(heap)
  local count = #heap
  local last, at = heap[count], 1
  heap[count] = nil
  count = count - 1
  if count == 0 then return end
  while true do
    local below = at * 2
    if below > count then break end
    if below < count and before(heap[below + 1], heap[below]) then below = below + 1 end
    if not before(heap[below], last) then break end
    heap[at] = heap[below]
    at = below
  end
  heap[at] = last
end

-- Begin a run with the first jobs of a line, `many` at most.
function Claims.open(line, many)
  local found, heads, ids = call('ZRANGE', B .. ':r:' .. line, 0, many - 1, 'WITHSCORES'), {}, {}
  for i = 1, #found, 2 do
    local id = sub(found[i], 9)
    ids[#ids + 1] = id
    heads[#heads + 1] = {rank = tonumber(found[i + 1]), turn = number_in(found[i]), id = id}
  end
  read_ahead(ids)
  Partitions.read_ahead(ids)
  return {
    line = line, ids = ids, heads = heads, at = 1, heap = {}, claims = {}, followed = 0,
    complete = #heads < many, ahead = math.ceil(many / math.max(1, #heads)),
  }
end

-- The next job of a run, which this function leaves in the run; nil when all jobs that were read are taken.
function Claims.first(run)
  local head, held = run.heads[run.at], run.heap[1]
  return held and (not head or before(held, head)) and held or head
end

-- The claim for the partition of a job; nil when the partition also has jobs in other lines. A lease may then change
-- which of its jobs stand in those lines.
function Claims.of(run, head, name)
  local claim = head.claim or run.claims[name]
  if claim then return claim end
  local partition = Partitions.of(name)
  if next(partition.lines, run.line) or next(partition.lines) ~= run.line then return nil end
  local key, settings = select(2, Partitions.split(name)), Settings.of_partition(name)
  claim = {
    partition = partition, settings = settings, keyed = key ~= '', paced = settings.rate or settings.window,
    taken = 0, spent = 0, left = 0, opening = Limiter.NEVER, members = {}, at = 1, complete = false,
  }
  run.claims[name] = claim
  return claim
end

local function note(claim)
  if claim.paced then Limiter.take(claim.settings, claim.partition.limiter, claim.spent) end
  claim.spent = 0
end

-- Whether the next job of a partition may start now.
local function opens(claim, cost)
  if claim.left > 0 and cost == 1 then
    claim.left = claim.left - 1
    return true
  end
  note(claim)
  local partition = claim.partition
  local when = Limiter.opens(claim.settings, partition.limiter, partition.running, cost)
  if when > 0 then
    claim.opening = when
    return false
  end
  if cost == 1 and claim.taken > 1 then -- more jobs of this partition are likely to follow
    claim.left = Limiter.room(claim.settings, partition.limiter, partition.running, Limiter.NEVER) - 1
  end
  return true
end

-- Put the next job of a partition into the heap, if it may start.
local function follow(run, claim, name)
  local partition, line = claim.partition, run.line
  if claim.at > #claim.members and not claim.complete then
    local first = claim.taken
    claim.members = call('ZRANGE', Partitions.park_of(line, name), first, first + run.ahead - 1, 'WITHSCORES')
    claim.at, claim.complete = 1, #claim.members < 2 * run.ahead
    if claim.paced or run.ahead > 1 then -- for their costs, or because several jobs may be taken
      local ids = {}
      for i = 1, #claim.members, 2 do ids[#ids + 1] = sub(claim.members[i], 9) end
      read_ahead(ids)
    end
  end
  local member = claim.members[claim.at]
  if not member then
    partition.lines[line] = nil
    return
  end
  local id, rank, number = sub(member, 9), tonumber(claim.members[claim.at + 1]), number_in(member)
  claim.at = claim.at + 2
  if not opens(claim, claim.paced and Partitions.cost_of(id) or 1) then
    partition.lines[line] = false
    return
  end
  local turn = claim.keyed and math.max(number, partition.turn) or number
  partition.lines[line] = {rank = rank, number = turn, id = id}
  push(run.heap, {rank = rank, turn = turn, id = id, claim = claim})
end

-- Record that the first job of a run is leased. With a claim, the job belongs to the partition `name`.
function Claims.take(run, head, claim, name, cost, token)
  if head == run.heads[run.at] then
    run.at = run.at + 1
  else
    pop(run.heap)
    run.followed = run.followed + 1
  end
  if not claim then return end
  claim.taken, claim.spent = claim.taken + 1, claim.spent + cost
  claim.partition.running, claim.partition.turn = claim.partition.running + 1, token
  follow(run, claim, name)
end

-- End a run: write its changes to the tables.
function Claims.close(run)
  local line, heap = run.line, run.heap
  local queue, empty = sub(line, 2), {}
  if run.at > 1 then call('ZREMRANGEBYRANK', B .. ':r:' .. line, 0, run.at - 2) end
  for _, one in ipairs(heap) do add_to_line(line, one.rank, pack('>I8', one.turn) .. one.id) end
  count(queue, 'parked', -run.followed - #heap)
  for name, claim in pairs(run.claims) do
    if claim.taken > 0 then
      call('ZREMRANGEBYRANK', Partitions.park_of(line, name), 0, claim.taken - 1)
      if claim.spent > 0 then note(claim) end
      if claim.partition.lines[line] == nil then empty[#empty + 1] = name end
      Partitions.arm(name, claim.partition, claim.settings, claim.opening)
      limits.changed[name] = true
    end
  end
  call_all('SREM', B .. ':parked:' .. line, empty)
  flush_lines()
end

end
