<?php
// Take orders from the tube "orders", for ever: composer require pda/pheanstalk (4), then php consume.php.
require is_file('vendor/autoload.php') ? 'vendor/autoload.php' : 'Pheanstalk/autoload.php';

use Pheanstalk\Pheanstalk;

$queue = Pheanstalk::create('127.0.0.1', getenv('PORT') ?: 11300);
$queue->watchOnly('orders');
while ($job = $queue->reserve()) { // ours for its time to run
    echo 'order ', json_decode($job->getData())->order, "\n";
    $queue->delete($job); // done; release would give it back, bury keep it for a human
}
