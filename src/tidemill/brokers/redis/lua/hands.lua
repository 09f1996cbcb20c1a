-- Leasing where lanes are: what one step takes of the lanes of a line.
--
-- The first job of a lane is found in the ready line; those behind it come from the lane's own table. The
-- next of each is held in a heap, and written only when it is not taken in the same step; what was taken is
-- struck off each table with one command, since it is always its first, and tokens are taken from a lane's
-- gate for all of its jobs together.

do

local Hands = {LIMITED = LIMITED}
Lanes.Hands = Hands -- a name of its own would be one more than Lua allows the library

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

-- Begin with the first of a line, so many of them.
function Hands.open(line, many)
  local found, heads, ids = call('ZRANGE', B .. ':r:' .. line, 0, many - 1, 'WITHSCORES'), {}, {}
  for i = 1, #found, 2 do
    local id = sub(found[i], 9)
    ids[#ids + 1] = id
    heads[#heads + 1] = {rank = tonumber(found[i + 1]), turn = number_in(found[i]), id = id}
  end
  read_ahead(ids)
  Lanes.read_ahead(ids)
  return {
    line = line, ids = ids, heads = heads, at = 1, heap = {}, hands = {}, followed = 0,
    complete = #heads < many, ahead = math.ceil(many / math.max(1, #heads)),
  }
end

-- The one that is next, which stays; nil when all that was read is taken.
function Hands.first(run)
  local head, held = run.heads[run.at], run.heap[1]
  return held and (not head or before(held, head)) and held or head
end

-- The hand for the lane of one; nil when the lane has jobs in other lines too, which may change with this.
function Hands.of(run, head, name)
  local hand = head.hand or run.hands[name]
  if hand then return hand end
  local lane = Lanes.of(name)
  if next(lane.lines, run.line) or next(lane.lines) ~= run.line then return nil end
  local key, terms = select(2, Lanes.split(name)), Terms.of_lane(name)
  hand = {
    lane = lane, terms = terms, keyed = key ~= '', paced = terms.rate or terms.window,
    taken = 0, spent = 0, left = 0, opening = Gate.NEVER, members = {}, at = 1, complete = false,
  }
  run.hands[name] = hand
  return hand
end

local function note(hand)
  if hand.paced then Gate.take(hand.terms, hand.lane.gate, hand.spent) end
  hand.spent = 0
end

-- Whether the next of a lane may start now.
local function opens(hand, cost)
  if hand.left > 0 and cost == 1 then
    hand.left = hand.left - 1
    return true
  end
  note(hand)
  local lane = hand.lane
  local when = Gate.opens(hand.terms, lane.gate, lane.running, cost)
  if when > 0 then
    hand.opening = when
    return false
  end
  if cost == 1 and hand.taken > 1 then -- others follow
    hand.left = Gate.room(hand.terms, lane.gate, lane.running, Gate.NEVER) - 1
  end
  return true
end

-- Hold the next of a lane, if it may start.
local function follow(run, hand, name)
  local lane, line = hand.lane, run.line
  if hand.at > #hand.members and not hand.complete then
    local first = hand.taken
    hand.members = call('ZRANGE', Lanes.park_of(line, name), first, first + run.ahead - 1, 'WITHSCORES')
    hand.at, hand.complete = 1, #hand.members < 2 * run.ahead
    if hand.paced or run.ahead > 1 then -- else it is not taken now, and its cost is not asked for
      local ids = {}
      for i = 1, #hand.members, 2 do ids[#ids + 1] = sub(hand.members[i], 9) end
      read_ahead(ids)
    end
  end
  local member = hand.members[hand.at]
  if not member then
    lane.lines[line] = nil
    return
  end
  local id, rank, number = sub(member, 9), tonumber(hand.members[hand.at + 1]), number_in(member)
  hand.at = hand.at + 2
  if not opens(hand, hand.paced and Lanes.cost_of(id) or 1) then
    lane.lines[line] = false
    return
  end
  local turn = hand.keyed and math.max(number, lane.turn) or number
  lane.lines[line] = {rank = rank, number = turn, id = id}
  push(run.heap, {rank = rank, turn = turn, id = id, hand = hand})
end

-- The first is leased; with a hand, of the lane of that name.
function Hands.take(run, head, hand, name, cost, token)
  if head == run.heads[run.at] then
    run.at = run.at + 1
  else
    pop(run.heap)
    run.followed = run.followed + 1
  end
  if not hand then return end
  hand.taken, hand.spent = hand.taken + 1, hand.spent + cost
  hand.lane.running, hand.lane.turn = hand.lane.running + 1, token
  follow(run, hand, name)
end

-- Have the tables as they are by now.
function Hands.close(run)
  local line, heap = run.line, run.heap
  local queue, empty = sub(line, 2), {}
  if run.at > 1 then call('ZREMRANGEBYRANK', B .. ':r:' .. line, 0, run.at - 2) end
  for _, one in ipairs(heap) do add_to_line(line, one.rank, pack('>I8', one.turn) .. one.id) end
  count(queue, 'parked', -run.followed - #heap)
  for name, hand in pairs(run.hands) do
    if hand.taken > 0 then
      call('ZREMRANGEBYRANK', Lanes.park_of(line, name), 0, hand.taken - 1)
      if hand.spent > 0 then note(hand) end
      if hand.lane.lines[line] == nil then empty[#empty + 1] = name end
      Lanes.arm(name, hand.lane, hand.terms, hand.opening)
      limits.changed[name] = true
    end
  end
  call_all('SREM', B .. ':parked:' .. line, empty)
  flush_lines()
end

end
